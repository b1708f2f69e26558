"""The mark of a folder that a run made."""

import os
import shutil

import pytest

from thinwire.compress.stores.durable import write_for_user, write_own
from thinwire.compress.stores.marks import claim, obstacle, remove, run_of, stray
from thinwire.errors.files import MARK, SIGNATURE


def test_a_folder_is_marked_once_and_goes_with_all_that_is_in_it(tmp_path):
    folder = tmp_path / "a" / "b"
    claim(folder, "0af3")
    claim(folder, "other")
    assert run_of(folder) == "0af3" and [path.name for path in folder.iterdir()] == [MARK]
    (folder / "c").mkdir()
    (folder / "c" / "file").touch()
    remove(folder, ["other"])
    assert (folder / "c" / "file").exists()
    remove(folder, ["other", "0af3"])
    assert not folder.exists() and (tmp_path / "a").exists()


def test_a_folder_without_a_mark_is_neither_taken_nor_removed(tmp_path):
    (tmp_path / "film").touch()
    with pytest.raises(FileExistsError, match=f"no run made {tmp_path}/film"):
        claim(tmp_path, "1")
    remove(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["film"]
    claim(tmp_path, "1", ("*.slots",))
    assert run_of(tmp_path) == "1"


@pytest.mark.parametrize("text", ["", "run 1", "A run of Thinwire"])
def test_a_name_is_no_mark(tmp_path, text):
    (tmp_path / "film").touch()
    (tmp_path / MARK).write_text(text)
    assert run_of(tmp_path) is None and obstacle(tmp_path) == f"no run made {tmp_path}/film"


def test_a_run_that_was_killed_while_it_marked_a_folder_can_do_it_again(tmp_path):
    (tmp_path / f"{MARK}.part").touch()
    claim(tmp_path, "1")
    assert run_of(tmp_path) == "1"


def test_what_is_stopped_while_it_removes_a_folder_can_do_it_again(tmp_path, monkeypatch):
    folder = tmp_path / "step"
    claim(folder, "1")
    (folder / "stage-0").mkdir()

    def stopped(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", stopped)
        with pytest.raises(KeyboardInterrupt):
            remove(folder)
    assert run_of(folder) == "1"
    remove(folder)
    assert not folder.exists()


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo])
def test_what_leads_out_of_a_folder_is_found_in_it(tmp_path, make):
    claim(tmp_path / "run", "1")
    (tmp_path / "run" / "a").mkdir()
    assert stray(tmp_path / "run") is None
    make(tmp_path / "run" / "a" / "b")
    assert stray(tmp_path / "run") == f"{tmp_path}/run/a/b is a link, a pipe or a device, and no run makes one"


def test_a_file_that_a_user_names_is_replaced_only_if_thinwire_wrote_it(tmp_path):
    path, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(path)
    for content in (f"{SIGNATURE} 1", f"{SIGNATURE} 2"):
        write_for_user(link, content.encode())
        assert path.read_text() == content and link.is_symlink()
    with pytest.raises(FileExistsError):
        write_own(link, SIGNATURE.encode())
    path.write_text("notes")
    with pytest.raises(FileExistsError, match="it is there, and Thinwire did not write it"):
        write_for_user(path, SIGNATURE.encode())
    assert path.read_text() == "notes"
