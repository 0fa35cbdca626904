"""A large step leaves in several Tokens, so that a gateway answers others between two; nothing is lost or comes twice."""

import pytest

from scheduler.outbox import MESSAGE_ROWS, Outbox
from shared.columns import f32, i32, read_f32, read_i32, read_i64
from shared.messages import Finish, PromptScores, Tokens


@pytest.mark.parametrize("num_rows", [0, 1, MESSAGE_ROWS, MESSAGE_ROWS + 1, 3 * MESSAGE_ROWS + 7])
def test_columns_leave_in_pieces(num_rows: int) -> None:
    box, width = Outbox("g/one/1", "one", "m"), 2
    box.ids, box.indexes, box.tokens = list(range(num_rows)), [9] * num_rows, list(range(5, 5 + num_rows))
    box.logprobs, box.top_width = f32([-float(row) for row in range(num_rows)]), width
    box.top_ids = i32(range(width * num_rows))
    box.top_logprobs = f32([-float(row) for row in range(width * num_rows)])
    box.started_ids, box.started_cached = [3], [16]
    box.finish(4, Finish.STOP)
    box.scores = [PromptScores(3, 1, b"", 0, b"", b"")]
    (_, scores), *sent = box.flush()
    assert isinstance(scores, PromptScores) and {peer for peer, _ in sent} == {"g/one/1"}
    pieces = [message for _, message in sent if isinstance(message, Tokens)]
    assert len(pieces) == max(1, -(-num_rows // MESSAGE_ROWS))
    assert [row for piece in pieces for row in read_i64(piece.ids)] == list(range(num_rows))
    assert [row for piece in pieces for row in read_i32(piece.tokens)] == list(range(5, 5 + num_rows))
    for piece in pieces:
        ids = read_i64(piece.ids)
        assert len(ids) <= MESSAGE_ROWS and piece.top_width == width and list(read_i32(piece.indexes)) == [9] * len(ids)
        assert list(read_f32(piece.logprobs)) == [-float(row) for row in ids]
        tops = [width * row + column for row in ids for column in range(width)]
        assert list(read_i32(piece.top_ids)) == tops
        assert list(read_f32(piece.top_logprobs)) == [-float(top) for top in tops]
    starts, ends = (
        [len(column) for column in each] for each in zip(*((p.started_ids, p.finished_ids) for p in pieces), strict=True)
    )
    assert starts == [8] + [0] * (len(pieces) - 1) and ends == [0] * (len(pieces) - 1) + [8]
    assert box.flush() == []
