//! GGUF files as models: what is refused. The guide's commands train on one.

use expect_test::expect;

use super::session::Session;

#[test]
fn files_that_cannot_be_read_are_refused_by_name() {
    let tiny = Session::new();
    tiny.succeed("export --format gguf --type f16 --model model --out model.gguf --no-verify");
    let good = tiny.bytes("model.gguf");
    for (bytes, expected) in [
        (
            good[..good.len() / 2].to_vec(),
            expect![[r#"
            error: bad.gguf: the file ends within its header or its tensors; copy or export it again
        "#]],
        ),
        (
            b"PK\x03\x04 and so on".to_vec(),
            expect![[r#"
            error: bad.gguf: not a GGUF file: it does not start with `GGUF`
        "#]],
        ),
    ] {
        std::fs::write(tiny.path("bad.gguf"), bytes).unwrap();
        let ended = tiny.run("info bad.gguf");
        assert_eq!(ended.status, 1);
        expected.assert_eq(&tiny.without_path(&ended.err));
    }
    let ended = tiny.run("info ollama:nowhere:1b");
    assert!(
        ended.err.contains("Ollama's store has no such model")
            && ended.err.contains("`ollama pull nowhere:1b` gets it"),
        "{}",
        ended.err
    );
}
