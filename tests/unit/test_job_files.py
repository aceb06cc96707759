"""A log is cut at characters, whatever is in it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.frontend.job_files import CHUNK_BYTES, read_piece, whole_characters
from pipeswitch.ipc.messages import JobName


@given(st.text(max_size=30), st.integers(0, 120))
def test_a_cut_never_splits_a_character(text: str, at: int) -> None:
    data = text.encode("utf-8", "ignore")[:at]
    whole = whole_characters(data)
    data[:whole].decode("utf-8")
    assert len(data) - whole < 4


@given(st.binary(max_size=20))
def test_bytes_that_are_no_text_do_not_stop_the_paging(data: bytes) -> None:
    assert len(data) - whole_characters(data) < 4


def test_pieces_join_to_the_whole_log(tmp_path: Path) -> None:
    text = "ü✔🚀" * (CHUNK_BYTES // 4)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "job-j.log").write_text(text, "utf-8")
    read, offset = "", 0
    while True:
        piece = read_piece(tmp_path, JobName("j"), "logs", offset)
        read, offset = read + piece["text"], piece["offset_bytes"]
        if offset == piece["end_bytes"]:
            break
    assert read == text
