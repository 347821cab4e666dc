"""Files: who holds a folder, and that a mark removed by its former owner holds nobody off and lets nobody in."""

import pytest

from fastweights import files
from fastweights.files import Taken, alone_in


@pytest.mark.skipif(files.fcntl is None, reason="files cannot be locked here")
def test_a_mark_that_vanished_before_it_was_claimed_is_made_anew(tmp_path, monkeypatch):
    claim, claimed = files.claim, []

    def late(file, refusal):
        claim(file, refusal)
        claimed.append(file)
        if len(claimed) == 1:
            (tmp_path / ".at-work").unlink()  # as one does who leaves between our opening it and our claim

    monkeypatch.setattr(files, "claim", late)
    with alone_in(tmp_path):
        assert len(claimed) == 2
        assert claimed[0].closed
        with pytest.raises(Taken, match="another process is at work"), alone_in(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []
    with alone_in(tmp_path):
        pass
