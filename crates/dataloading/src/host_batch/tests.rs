use super::*;

fn numbers(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.f_to_kind(Kind::Int64).unwrap().f_reshape([-1]).unwrap()).unwrap()
}

#[test]
fn rows_are_padded_and_labelled() {
    let mut host = HostBatch::new(Device::Cpu);
    let documents: [&[u32]; 4] = [&[5, 6, 7], &[8], &[1, 2, 3, 4, 5], &[]];
    host.write_rows(documents.into_iter(), 4, 99, 2).unwrap();
    let batch = host.finish().unwrap();
    assert_eq!(batch.tokens.size(), [4, 4]);
    assert_eq!(numbers(&batch.tokens), [5, 6, 7, 99, 8, 99, 99, 99, 1, 2, 3, 4, 99, 99, 99, 99]);
    const I: i64 = IGNORE_INDEX;
    assert_eq!(numbers(&batch.labels), [6, 7, I, I, I, I, I, I, 2, 3, 4, I, I, I, I, I]);
    let expected = Counts { documents: 4, tokens: 8, padding: 8, targets: 5, dropped: 3 };
    assert_eq!(batch.counts, expected);
    assert!(batch.packing.is_none());
}

#[test]
fn packed_rows_carry_their_documents() {
    let mut host = HostBatch::new(Device::Cpu);
    let documents: [(usize, &[u32]); 4] = [(0, &[5, 6, 7]), (0, &[8, 9]), (2, &[1, 2, 3, 4]), (2, &[3])];
    host.write_packed(documents.into_iter(), 4, 5, 0, 0).unwrap();
    let batch = host.finish().unwrap();
    const I: i64 = IGNORE_INDEX;
    assert_eq!(numbers(&batch.tokens), [5, 6, 7, 8, 9, 0, 0, 0, 0, 0, 1, 2, 3, 4, 3, 0, 0, 0, 0, 0]);
    assert_eq!(numbers(&batch.labels), [6, 7, I, 9, I, I, I, I, I, I, 2, 3, 4, I, I, I, I, I, I, I]);
    let packing = batch.packing.unwrap();
    assert_eq!(numbers(&packing.positions), [0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 1, 2, 3, 4]);
    assert_eq!(numbers(&packing.document_ids), [0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 5, 5, 5, 5, 5]);
    assert_eq!(packing.starts, [0, 3, 5, 10, 14, 15, 20]);
    assert_eq!(packing.cu_seqlens.kind(), Kind::Int);
    assert_eq!(numbers(&packing.cu_seqlens), [0, 3, 5, 10, 14, 15, 20]);
    assert_eq!(packing.longest, 5);
    assert_eq!(batch.counts, Counts { documents: 4, tokens: 10, padding: 10, targets: 6, dropped: 0 });
}

#[test]
fn memory_under_a_live_batch_is_not_written() {
    let mut host = HostBatch::new(Device::Cpu);
    host.write_rows([&[1_u32, 2][..]].into_iter(), 2, 0, 0).unwrap();
    let first = host.finish().unwrap();
    host.write_rows([&[3_u32, 4][..]].into_iter(), 2, 0, 0).unwrap();
    let second = host.finish().unwrap();
    assert_eq!((numbers(&first.tokens), numbers(&second.tokens)), (vec![1, 2], vec![3, 4]));
    let address = second.tokens.data_ptr();
    drop(second);
    host.write_rows([&[5_u32, 6][..]].into_iter(), 2, 0, 0).unwrap();
    assert_eq!(host.finish().unwrap().tokens.data_ptr(), address);
}

#[test]
fn mismatched_inputs_are_refused() {
    let mut host = HostBatch::new(Device::Cpu);
    let error = host.write_packed([(0, &[1_u32, 2, 3][..])].into_iter(), 1, 2, 0, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "packed batch: a document of 3 tokens does not fit into row 0 of 1 rows of 2"
    );
    let error = host.write_packed([(usize::MAX, &[1_u32][..])].into_iter(), 1, 2, 0, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "packed batch: a document of 1 tokens does not fit into row 18446744073709551615 of 1 rows of 2"
    );
    let error = host.write_rows([&[1_u32][..]].into_iter(), usize::MAX, 0, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "host batch: 1 rows of 18446744073709551615 positions exceed the memory; use fewer"
    );
}
