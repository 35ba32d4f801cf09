//! The hub's address, and requests to it. The token goes to the hub's own origin (scheme, host and port) and nowhere else, so redirects are
//! followed here: `ureq` compares hosts without their ports.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use ureq::http::header::{AUTHORIZATION, LOCATION, RANGE};
use ureq::http::{Response, Uri};
use ureq::{Agent, Body};

use super::Hub;
use super::cache;

const HUB: &str = "https://huggingface.co";

/// Timeout for connecting to the hub.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Redirects of one request.
const MAX_REDIRECTS: usize = 10;

/// The hub's address, and the HTTP client.
pub(super) struct Http {
    pub(super) endpoint: String,
    token: Option<String>,
    agent: Agent,
}

impl Http {
    pub(super) fn new(hub: &Hub) -> Self {
        let endpoint = hub.endpoint.clone().or_else(|| cache::variable("HF_ENDPOINT"));
        let endpoint = endpoint.as_deref().unwrap_or(HUB).trim_end_matches('/').to_owned();
        let agent = Agent::config_builder()
            .max_redirects(0)
            // Applies to every redirect, because each is a request.
            .https_only(!endpoint.to_ascii_lowercase().starts_with("http://"))
            .user_agent(concat!("frugal/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(TIMEOUT))
            .timeout_recv_response(Some(TIMEOUT))
            .timeout_per_read(Some(TIMEOUT))
            .build();
        Self { endpoint, token: token(), agent: agent.into() }
    }

    /// Asks for what is at an address, from a byte on. Follows redirects.
    pub(super) fn get(&self, url: &str, start: u64) -> Result<Response<Body>, ureq::Error> {
        let home = self.endpoint.parse().ok().and_then(|endpoint| origin(&endpoint));
        let bad = |address: &str| ureq::Error::BadUri(address.to_owned());
        let mut address: Uri = url.parse().map_err(|_| bad(url))?;
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.agent.get(&address);
            let token = self.token.as_ref().filter(|_| home.is_some() && origin(&address) == home);
            if let Some(token) = token {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            if start > 0 {
                request = request.header(RANGE, format!("bytes={start}-"));
            }
            let response = request.call()?;
            let location = response.headers().get(LOCATION).filter(|_| response.status().is_redirection());
            let Some(location) = location else { return Ok(response) };
            let location = location.to_str().map_err(|_| bad("a redirect that is not ASCII"))?;
            address = resolved(&address, location).ok_or_else(|| bad(location))?;
        }
        Err(ureq::Error::TooManyRedirects)
    }
}

/// Scheme, host and port of an address.
fn origin(address: &Uri) -> Option<(String, String, u16)> {
    let scheme = address.scheme_str()?.to_ascii_lowercase();
    let port = match (address.port_u16(), &*scheme) {
        (Some(port), _) => port,
        (None, "http") => 80,
        (None, "https") => 443,
        _ => return None,
    };
    Some((scheme, address.host()?.to_ascii_lowercase(), port))
}

/// The address that a redirect of `base` leads to.
fn resolved(base: &Uri, location: &str) -> Option<Uri> {
    let location = location.split('#').next()?;
    let scheme = base.scheme_str()?;
    let authority = base.authority()?;
    let is_whole = location.split('/').next()?.ends_with(':');
    let address = match location {
        _ if is_whole => location.to_owned(),
        _ if location.starts_with("//") => format!("{scheme}:{location}"),
        _ if location.starts_with('/') => format!("{scheme}://{authority}{location}"),
        _ => {
            let folder = base.path().rsplit_once('/').map_or("", |(folder, _)| folder);
            format!("{scheme}://{authority}{folder}/{location}")
        }
    };
    address.parse().ok()
}

/// Reads `HF_TOKEN`, or the token that `hf auth login` saved.
fn token() -> Option<String> {
    cache::variable("HF_TOKEN").or_else(|| {
        let path = cache::variable("HF_TOKEN_PATH").map(PathBuf::from);
        let text = fs::read_to_string(path.or_else(|| Some(cache::home()?.join("token")))?).ok()?;
        Some(text.trim().to_owned()).filter(|token| !token.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    use super::*;

    /// Answers each request as told, and returns which of them had a token.
    fn server(listener: TcpListener, answers: Vec<String>) -> std::thread::JoinHandle<Vec<(String, bool)>> {
        std::thread::spawn(move || {
            let mut seen = Vec::new();
            for answer in answers {
                let (stream, _) = listener.accept().unwrap();
                let mut lines = BufReader::new(&stream).lines().map(Result::unwrap);
                let path = lines.next().unwrap().split(' ').nth(1).unwrap().to_owned();
                let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
                let token =
                    headers.iter().any(|line| line.eq_ignore_ascii_case("authorization: Bearer hf_secret"));
                seen.push((path, token));
                (&stream).write_all(answer.as_bytes()).unwrap();
            }
            seen
        })
    }

    fn redirect(to: &str) -> String {
        format!("HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    }

    #[test]
    fn a_token_goes_to_the_hubs_own_origin_alone() {
        let [hub, other] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [at_hub, at_other] = [&hub, &other].map(|listener| listener.local_addr().unwrap());
        let last = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok".to_owned();
        // A renamed repository, a file beside it, another port of the same host, and back.
        let answers = vec![
            redirect("/models/new"),
            redirect("weights"),
            redirect(&format!("http://{at_other}/cdn")),
            last,
        ];
        let hub = server(hub, answers);
        let other = server(other, vec![redirect(&format!("http://{at_hub}/back#part"))]);
        let http = Http {
            token: Some("hf_secret".to_owned()),
            ..Http::new(&Hub { endpoint: Some(format!("http://{at_hub}")), ..Hub::default() })
        };
        let mut response = http.get(&format!("http://{at_hub}/models/old"), 0).unwrap();
        assert_eq!(response.body_mut().read_to_string().unwrap(), "ok");
        let path = |path: &str, token| (path.to_owned(), token);
        assert_eq!(other.join().unwrap(), [path("/cdn", false)]);
        let expected =
            ["/models/old", "/models/new", "/models/weights", "/back"].map(|name| path(name, true));
        assert_eq!(hub.join().unwrap(), expected);
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let same = |one: &str, other: &str| origin(&one.parse().unwrap()) == origin(&other.parse().unwrap());
        assert!(same("https://hub.example/a", "HTTPS://HUB.example:443/b?c"));
        for other in ["http://hub.example", "https://hub.example:8443", "https://cdn.hub.example"] {
            assert!(!same("https://hub.example", other), "{other}");
        }
    }
}
