"""The cache of compiled code: made for its owner only, and refused where others could put code into it."""

import os
import platform
import stat

import pytest

from lockstep import cache
from lockstep.cache import UnsafeCache, cache_folder
from lockstep.ops.native.build import library_path
from lockstep.ops.native.instruction_sets import BY_MACHINE


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    cache._fallback_for.cache_clear()
    return tmp_path / "home"


def test_the_cache_folder_is_made_for_its_owner_only_under_any_umask(home):
    before = os.umask(0)
    try:
        folder = cache_folder()
    finally:
        os.umask(before)
    assert folder == home / "lockstep" and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(home.stat().st_mode) == 0o700, "whoever can write here can put another folder in its place"
    folder.chmod(0o755)
    assert cache_folder() == folder, "others may read it"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused_with_what_to_do(home, mode):
    (home / "lockstep").mkdir(parents=True)
    (home / "lockstep").chmod(mode)
    with pytest.raises(UnsafeCache, match=rf"other users can write to it \(mode {mode:o}\).*rm -r .*XDG_CACHE_HOME"):
        cache_folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_and_a_link_of_another_user_are_refused(home, tmp_path):
    home.mkdir()
    (tmp_path / "own").mkdir(mode=0o700)
    (home / "lockstep").symlink_to(tmp_path / "own")
    assert cache_folder() == home / "lockstep"
    os.chown(home / "lockstep", 4242, 4242, follow_symlinks=False)
    with pytest.raises(UnsafeCache, match="belongs to user 4242, but this process runs as user 0"):
        cache_folder()
    (home / "lockstep").unlink()
    (home / "lockstep").mkdir()
    os.chown(home / "lockstep", 4242, 4242)
    with pytest.raises(UnsafeCache, match="belongs to user 4242"):
        cache_folder()


def test_where_nothing_can_be_written_a_private_temporary_folder_serves_with_a_warning(home, monkeypatch, tmp_path):
    # A file in its way stops root too.
    home.write_text("")
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match="cannot be used .*Set XDG_CACHE_HOME"):
        folder = cache_folder()
    assert folder == tmp_path / f"lockstep-{os.geteuid()}" and stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("target", ["trap", "nothing"])
def test_a_link_in_place_of_the_temporary_folder_is_refused(home, monkeypatch, tmp_path, target):
    home.write_text("")
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "trap").mkdir()
    (tmp_path / f"lockstep-{os.geteuid()}").symlink_to(tmp_path / target)
    with pytest.raises(UnsafeCache, match="is a link"):
        cache_folder()


@pytest.mark.parametrize("suffix", [".so", ".sha256"])
def test_compiled_kernels_are_their_owners_and_refused_where_others_may_write_to_them(
    home, monkeypatch, tmp_path, suffix
):
    # Instead of a compiler, a script that writes a file under the name after -o.
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\n: > "$last"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    instructions = next(iter(BY_MACHINE[platform.machine().lower()]))
    before = os.umask(0)
    try:
        library = library_path(instructions)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in sorted(library.parent.iterdir())] == [0o600, 0o600]
    library.with_suffix(suffix).chmod(0o660)
    with pytest.raises(UnsafeCache, match="other users can write to it .*rm -r"):
        library_path(instructions)
