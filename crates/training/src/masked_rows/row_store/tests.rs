use super::*;

fn row(number: i64) -> MaskedRow {
    let tokens: Vec<i64> = (0..number % 7).map(|at| number * 31 + at).collect();
    let labels = (0..).zip(&tokens);
    let labels = labels.map(|(at, id)| if (at + number) % 3 == 0 { *id } else { IGNORE_INDEX }).collect();
    MaskedRow { tokens, labels, weight: number as f32 - 3.0 }
}

#[test]
fn rows_on_disk_are_those_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let all: Vec<MaskedRow> = (0..500).map(row).collect();
    let held = MaskedRows::of(&all).unwrap();
    for bound in [0, 100, 1 << 20] {
        let mut writer = MaskedRowsWriter::new(bound, folder.path());
        all.iter().for_each(|row| writer.push(row).unwrap());
        let rows = writer.finish().unwrap();
        assert_eq!(matches!(rows.sources[0].content.rows, ByteStore::File { .. }), bound < 1 << 20);
        assert_eq!(rows.to_vec().unwrap(), all);
        assert_eq!(rows, held);
        let path = folder.path().join("rows");
        let mut bytes = b"before".to_vec();
        rows.write(&mut bytes).unwrap();
        std::fs::write(&path, &bytes).unwrap();
        let again = MaskedRows::read_file(File::open(&path).unwrap(), 6).unwrap();
        assert_eq!(again, held);
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert!(MaskedRows::read_file(File::open(&path).unwrap(), 6).is_err());
    }
    let learned = |row: &MaskedRow| row.labels.iter().skip(1).filter(|label| **label >= 0).count();
    for (number, row) in all.iter().enumerate() {
        let size = RowSize { tokens: row.tokens.len(), learned: learned(row) };
        assert_eq!(held.size(number).unwrap(), size);
    }
}

#[test]
fn parts_have_the_rows_that_lists_have() {
    let all: Vec<MaskedRow> = (0..40).map(row).collect();
    let rows = MaskedRows::of(&all).unwrap();
    let (rest, parted) = rows.divide(&[0, 3, 4, 39]);
    let (rest, second) = rest.divide(&[0, 1, 35]);
    let is_kept = |number: &usize| ![0, 3, 4, 39, 1, 2, 38].contains(number);
    let expected: Vec<MaskedRow> = (0..40).filter(is_kept).map(|number| all[number].clone()).collect();
    assert_eq!(rest.to_vec().unwrap(), expected);
    let of = |numbers: &[usize]| numbers.iter().map(|number| all[*number].clone()).collect::<Vec<_>>();
    assert_eq!(parted.to_vec().unwrap(), of(&[0, 3, 4, 39]));
    assert_eq!(second.to_vec().unwrap(), of(&[1, 2, 38]));
    let (rest, parted) = parted.divide(&[1, 2]);
    assert_eq!((rest.to_vec().unwrap(), parted.to_vec().unwrap()), (of(&[0, 39]), of(&[3, 4])));
    assert_eq!(rows.first(3).to_vec().unwrap(), all[..3]);
    assert_eq!(rows.first(99), rows);
}

#[test]
fn rows_of_several_sources_follow_each_other() {
    let all: Vec<MaskedRow> = (0..40).map(row).collect();
    let parts = [0..7, 7..7, 7..30, 30..40].map(|part| MaskedRows::of(&all[part]).unwrap());
    let rows = MaskedRows::join(parts);
    assert_eq!(rows, MaskedRows::of(&all).unwrap());
    let (rest, parted) = rows.divide(&[0, 6, 7, 29, 39]);
    assert_eq!(parted, MaskedRows::of(&[0, 6, 7, 29, 39].map(|number| all[number].clone())).unwrap());
    assert_eq!(rest.sources().collect::<Vec<_>>(), [5, 0, 21, 9]);
    assert_eq!(rest.divide(&[4, 5]).1, MaskedRows::of(&[5, 8].map(|number| all[number].clone())).unwrap());
    assert_eq!(rows.weight(33).unwrap(), all[33].weight);
    assert!(rows.write(&mut Vec::new()).unwrap_err().to_string().contains("several sources"));
}

#[test]
fn rows_that_cannot_be_stored_are_refused() {
    let refused = |tokens: &[i64], labels: &[i64]| {
        let row = MaskedRow::new(tokens.to_vec(), labels.to_vec());
        MaskedRows::of(&[row]).unwrap_err().to_string()
    };
    assert!(refused(&[1, 2], &[1]).contains("row 0 has 2 tokens and 1 labels"));
    assert!(refused(&[1, -2], &[1, -2]).contains("has the token -2"));
    assert!(refused(&[1, 1 << 32], &[1, -100]).contains("has the token 4294967296"));
    assert!(refused(&[1, 2], &[-100, 3]).contains("the label 3 at token 1, which is 2"));
}
