//! A reader of TensorBoard's event files, from the definitions of TensorFlow's records and of `event.proto`.

/// A scalar: tag, step, value.
pub(crate) type Scalar = (String, u64, f32);

/// What an event file says.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Events {
    pub(crate) version: String,
    /// The steps at which a program began.
    pub(crate) starts: Vec<u64>,
    pub(crate) scalars: Vec<Scalar>,
}

/// CRC-32C, bit by bit.
fn crc_32c(bytes: &[u8]) -> u32 {
    let bit = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(!0u32, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), bit))
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(count);
    *bytes = rest;
    taken
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let (mut value, mut shift) = (0, 0);
    loop {
        let byte = take(bytes, 1)[0];
        value |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            return value;
        }
    }
}

/// The fields of a message of protocol buffers: their numbers, and a number or bytes.
fn fields(mut bytes: &[u8]) -> Vec<(u64, u64, &[u8])> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let (value, length) = match key & 7 {
            0 => (varint(&mut bytes), 0),
            1 => (0, 8),
            2 => (0, varint(&mut bytes) as usize),
            5 => (0, 4),
            other => panic!("wire type {other}"),
        };
        all.push((key >> 3, value, take(&mut bytes, length)));
    }
    all
}

fn checked<'a>(bytes: &mut &'a [u8], length: usize) -> &'a [u8] {
    let content = take(bytes, length);
    let stored = u32::from_le_bytes(take(bytes, 4).try_into().unwrap());
    let crc = crc_32c(content);
    assert_eq!(stored, crc.rotate_right(15).wrapping_add(0xa282_ead8), "the checksum of {length} bytes");
    content
}

/// Reads a whole file.
pub(crate) fn read(mut bytes: &[u8]) -> Events {
    let mut events = Events::default();
    while !bytes.is_empty() {
        let length = u64::from_le_bytes(checked(&mut bytes, 8).try_into().unwrap());
        let event = fields(checked(&mut bytes, length as usize));
        let step = event.iter().find(|(number, ..)| *number == 2).map_or(0, |(_, step, _)| *step);
        for (number, _, content) in event {
            match number {
                1 => assert!(f64::from_le_bytes(content.try_into().unwrap()) > 1.7e9, "seconds since 1970"),
                2 => {}
                3 => events.version = String::from_utf8(content.to_vec()).unwrap(),
                5 => {
                    for (_, _, value) in fields(content) {
                        let value = fields(value);
                        assert!(
                            value.len() == 2 && (value[0].0, value[1].0) == (1, 2),
                            "a tag and a simple value"
                        );
                        let tag = String::from_utf8(value[0].2.to_vec()).unwrap();
                        let scalar = f32::from_le_bytes(value[1].2.try_into().unwrap());
                        events.scalars.push((tag, step, scalar));
                    }
                }
                7 => {
                    assert_eq!(fields(content), [(1, 1, &[][..])], "the status is START");
                    events.starts.push(step);
                }
                other => panic!("field {other}"),
            }
        }
    }
    events
}
