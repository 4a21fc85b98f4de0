"""Where updates come from: signatures, trusted keys, and old states that are played again."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.cli.tutorial import run
from tests.store.helpers import learn_more, tree
from zeroforget.files.json_fields import sealed
from zeroforget.store import Model, ModelError, open_model
from zeroforget.store.folder import Folder
from zeroforget.store.trust import PASSPHRASE, Key, change_keys, new_key, public_key, read_trust
from zeroforget.store.update import MAGIC, SIGNED, Terms, is_update, read_update
from zeroforget.store.verify import verify
from zeroforget.store.writing import Watch


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Private keys of two people."""
    (tmp_path / "keys").mkdir()
    new_key(tmp_path / "keys" / "anna", "anna")
    new_key(tmp_path / "keys" / "eve", "eve")
    return tmp_path / "keys" / "anna", tmp_path / "keys" / "eve"


def public(key: Path) -> Key:
    return public_key(f"{key}.pub")


@pytest.fixture
def trusting(copied: Callable[[], Model], keys: tuple[Path, Path], tmp_path: Path) -> tuple[Model, Model]:
    """A model, and one a task behind that trusts anna."""
    ahead, behind = copied(), copied()
    behind.undo()
    change_keys(behind.folder, lambda there: (*there, public(keys[0])), Watch())
    return ahead, behind


def refused(model: Model, update: Path, why: str, **terms: Any) -> None:
    before = tree(model.path)
    with pytest.raises(ModelError, match=why):
        model.receive(update, terms=Terms(**terms))
    assert tree(model.path) == before


def test_a_signed_update_of_a_trusted_key_is_received(
    trusting: tuple[Model, Model], keys: tuple[Path, Path], tmp_path: Path
) -> None:
    ahead, behind = trusting
    ahead.ship(tmp_path / "u.zfu", since="low", key=keys[0])
    assert is_update(tmp_path / "u.zfu")
    said: list[str] = []
    assert len(behind.receive(tmp_path / "u.zfu", watch=Watch(say=said.append))) == 1
    assert "is signed by 'anna'" in said[0]
    assert behind.verify()
    assert read_trust(behind.folder).head == ahead.head


def test_without_trust_the_origin_is_said_to_be_unknown(
    copied: Callable[[], Model], keys: tuple[Path, Path], tmp_path: Path
) -> None:
    ahead = copied()
    for key, what in ((None, "not signed"), (keys[1], "signed by 'eve'")):
        behind = copied()
        behind.undo()
        ahead.ship(tmp_path / "u.zfu", since="low", key=key)
        said: list[str] = []
        behind.receive(tmp_path / "u.zfu", watch=Watch(say=said.append))
        assert "is unknown: it is" in said[0]
        assert what in said[0]
        (tmp_path / "u.zfu").unlink()


def test_unsigned_and_unknown_ones_are_refused_once_a_key_is_trusted(
    trusting: tuple[Model, Model], keys: tuple[Path, Path], tmp_path: Path
) -> None:
    ahead, behind = trusting
    ahead.ship(tmp_path / "plain.zfu", since="low")
    ahead.ship(tmp_path / "eve.zfu", since="low", key=keys[1])
    refused(behind, tmp_path / "plain.zfu", r"is not signed, and this model takes what 'anna' \(\w{16}\) signed")
    refused(behind, tmp_path / "eve.zfu", r"is signed by 'eve' .* takes what 'anna'")


@pytest.mark.parametrize("part", ["key", "name", "signed", "signature"])
def test_a_changed_signature_is_refused(
    trusting: tuple[Model, Model], keys: tuple[Path, Path], tmp_path: Path, part: str
) -> None:
    """Even where nothing is trusted yet: a wrong signature is no origin at all."""
    ahead, behind = trusting
    ahead.ship(tmp_path / "u.zfu", since="low", key=keys[1])
    update = read_update(tmp_path / "u.zfu")
    assert update.signature is not None
    values = update.signature.to_json()
    values[part] = {
        "key": public(keys[0]).key, "name": "anna", "signed": "2030-01-01T00:00:00.000000Z", "signature": "0" * 128,
    }[part]  # fmt: skip
    content = (tmp_path / "u.zfu").read_bytes()
    plain = content[content.index(MAGIC) :]
    text = sealed(values)
    (tmp_path / "u.zfu").write_bytes(b"".join([SIGNED, len(text).to_bytes(8, "big"), text, plain]))
    refused(behind, tmp_path / "u.zfu", "is not right for it")


def test_a_signature_does_not_fit_another_update(
    trusting: tuple[Model, Model], keys: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    ahead, behind = trusting
    ahead.ship(tmp_path / "good.zfu", since="low", key=keys[0])
    other = open_model(behind.path)
    learn_more(other, data, "high", epochs=1)
    other.ship(tmp_path / "other.zfu", since="low")
    other.undo()
    good = (tmp_path / "good.zfu").read_bytes()
    bad = good[: good.index(MAGIC)] + (tmp_path / "other.zfu").read_bytes()
    (tmp_path / "bad.zfu").write_bytes(bad)
    refused(behind, tmp_path / "bad.zfu", "is not right for it")


def test_an_old_state_that_is_played_again_is_noticed(
    trusting: tuple[Model, Model], keys: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    """A task that its maker took back and learned anew does not come back by its old update."""
    ahead, behind = trusting
    ahead.ship(tmp_path / "old.zfu", since="low", key=keys[0])
    ahead.undo()
    learn_more(ahead, data, "high", epochs=1)
    ahead.ship(tmp_path / "new.zfu", since="low", key=keys[0])
    behind.receive(tmp_path / "new.zfu")
    newest = behind.path / "tasks" / "002-high"
    newest.rename(tmp_path / "away")  # a hand in the folder, not undo
    assert not verify(Folder(behind.path))
    assert "is an earlier or another one now" in str(verify(Folder(behind.path)).proofs)
    behind.refresh()
    refused(behind, tmp_path / "old.zfu", "before the newest that this model has received")
    assert behind.receive(tmp_path / "old.zfu", terms=Terms(older=True))
    assert verify(Folder(behind.path))


def test_what_a_kill_kept_from_being_noted_is_noted_when_the_update_comes_again(
    trusting: tuple[Model, Model], keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is in its place, and what it was signed with is not written down yet."""
    ahead, behind = trusting
    ahead.ship(tmp_path / "u.zfu", since="low", key=keys[0])
    with monkeypatch.context() as patch:
        patch.setattr("zeroforget.store.update.write_trust", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            behind.receive(tmp_path / "u.zfu")
    behind.refresh()
    assert behind.head == ahead.head
    assert behind.receive(tmp_path / "u.zfu") == ()
    assert read_trust(behind.folder).head == ahead.head
    (behind.path / "tasks" / "002-middle").rename(tmp_path / "away")
    assert not verify(Folder(behind.path))


def test_an_older_update_that_is_there_already_changes_nothing(
    trusting: tuple[Model, Model], keys: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    ahead, behind = trusting
    ahead.ship(tmp_path / "old.zfu", since="low", key=keys[0])
    learn_more(ahead, data, "high", epochs=1)
    ahead.ship(tmp_path / "new.zfu", since="low", key=keys[0])
    behind.receive(tmp_path / "new.zfu")
    before = read_trust(behind.folder)
    assert behind.receive(tmp_path / "old.zfu") == ()
    assert read_trust(behind.folder) == before


@pytest.mark.parametrize("kind", ["missing", "pipe"])
def test_a_key_that_is_no_file_is_told_in_words(trained: Path, tmp_path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / "k")
    with pytest.raises(ModelError, match="holds no public key: it is") as told:
        public_key(str(tmp_path / "k"))
    assert "undo" not in str(told.value)
    with pytest.raises(ModelError, match="is no private key: it is"):
        open_model(trained).ship(tmp_path / "u.zfu", key=tmp_path / "k")


def test_undo_is_no_rollback_and_the_same_update_may_come_again(
    trusting: tuple[Model, Model], keys: tuple[Path, Path], tmp_path: Path
) -> None:
    ahead, behind = trusting
    ahead.ship(tmp_path / "u.zfu", since="low", key=keys[0])
    behind.receive(tmp_path / "u.zfu")
    behind.undo()
    assert behind.verify()
    assert len(behind.receive(tmp_path / "u.zfu")) == 1


def test_a_first_model_is_received_of_a_named_key_alone(trained: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    open_model(trained).ship(tmp_path / "all.zfu", key=keys[0])
    phone = open_model(tmp_path / "phone")
    with pytest.raises(ModelError, match=r"is not of 'eve' \(\w{16}\): it is signed by 'anna'"):
        phone.receive(tmp_path / "all.zfu", terms=Terms(trust=public(keys[1])))
    assert not (tmp_path / "phone").exists()
    phone.receive(tmp_path / "all.zfu", terms=Terms(trust=public(keys[0])))
    assert read_trust(phone.folder).keys == (public(keys[0]),)
    assert phone.verify()


def test_the_hash_is_compared_before_anything_changes(trained: Path, tmp_path: Path) -> None:
    model = open_model(trained)
    model.ship(tmp_path / "all.zfu")
    with pytest.raises(ModelError, match=f"leads to the model {model.head[:16]}, not {'0' * 16}"):
        open_model(tmp_path / "phone").receive(tmp_path / "all.zfu", terms=Terms(head="0" * 16))
    assert not (tmp_path / "phone").exists()
    open_model(tmp_path / "phone").receive(tmp_path / "all.zfu", terms=Terms(head=model.head[:20].upper()))


def test_a_key_is_for_its_owner_and_never_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = new_key(tmp_path / "k", "anna")
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600
    assert public_key(f"{tmp_path}/k.pub") == made
    with pytest.raises(ModelError, match="a key is never written over"):
        new_key(tmp_path / "k", "anna")
    with pytest.raises(ModelError, match="a key is named by one word"):
        new_key(tmp_path / "other", "a b")
    monkeypatch.setenv(PASSPHRASE, "secret")
    new_key(tmp_path / "locked", "anna")
    assert b"ENCRYPTED" in (tmp_path / "locked").read_bytes()


def test_a_locked_key_wants_its_word(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSPHRASE, "secret")
    new_key(tmp_path / "locked", "anna")
    open_model(trained).ship(tmp_path / "u.zfu", key=tmp_path / "locked")
    for word, why in (("other", "another word unlocks it"), ("", "it is locked; set ZEROFORGET_PASSPHRASE")):
        monkeypatch.setenv(PASSPHRASE, word)
        with pytest.raises(ModelError, match=why):
            open_model(trained).ship(tmp_path / "v.zfu", key=tmp_path / "locked")
    (tmp_path / "text").write_text("no key")
    monkeypatch.delenv(PASSPHRASE)
    with pytest.raises(ModelError, match="is no private key"):
        open_model(trained).ship(tmp_path / "v.zfu", key=tmp_path / "text")
    assert not (tmp_path / "v.zfu").exists()


def test_the_commands_make_trust_and_forget_keys(trained: Path, copied: Callable[[], Model], tmp_path: Path) -> None:
    behind = copied()
    behind.undo()
    assert run(f"zeroforget key new {tmp_path}/anna")[1] == 0
    assert run(f"zeroforget key new {tmp_path}/next")[1] == 0
    assert "trusts 'anna'" in run(f"zeroforget key trust {behind.path} {tmp_path}/anna.pub")[0]
    assert run(f"zeroforget ship {trained} --since low -o {tmp_path}/u.zfu --sign {tmp_path}/next")[1] == 0
    output, code = run(f"zeroforget receive {behind.path} {tmp_path}/u.zfu")
    assert code != 0
    assert "is signed by 'next'" in output
    run(f"zeroforget key trust {behind.path} {tmp_path}/next.pub")  # a key is exchanged: the new one first
    assert "trusts 'next'" in run(f"zeroforget key forget {behind.path} anna")[0]
    assert run(f"zeroforget receive {behind.path} {tmp_path}/u.zfu")[1] == 0
    assert "newest signed state" in run(f"zeroforget key list {behind.path}")[0]
    assert "names 0 of the keys" in run(f"zeroforget key forget {behind.path} anna")[0]
