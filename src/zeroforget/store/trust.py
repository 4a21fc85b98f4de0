"""Where updates come from: keys that sign them (Ed25519), and those that a model trusts, in its trust.json."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from zeroforget.files import atomic, json_fields
from zeroforget.files.json_fields import FieldError, Fields, sealed
from zeroforget.files.text import has_hidden
from zeroforget.store.errors import ModelError, damage_told
from zeroforget.store.folder import Chain, Folder
from zeroforget.store.schema import read_bytes, unsealed
from zeroforget.store.writing import Watch, changing

TRUST = "trust.json"
PASSPHRASE = "ZEROFORGET_PASSPHRASE"
"""The environment's word that a private key is locked with, if it is."""
_KEY = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_SIGNED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z|")
_LINE = re.compile(r"zeroforget-key (\S{1,64}) ([0-9a-f]{64})\s*")
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class Key:
    """A public key and what its holder is called."""

    name: str
    key: str

    @property
    def short(self) -> str:
        """Enough of it to tell it from others."""
        return f"'{self.name}' ({self.key[:16]})"


@dataclass(frozen=True)
class Signature:
    """Who signed an update, and when."""

    key: Key
    signed: str
    signature: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        head = {"format": "zeroforget signature", "version": 1}
        return head | asdict(self.key) | {"signed": self.signed, "signature": self.signature}


@dataclass(frozen=True)
class Trust:
    """Whose updates a model takes, and the newest signed state that it had."""

    keys: tuple[Key, ...] = ()
    signed: str = ""
    """When the newest update that was received had been signed; an older one is a step back."""
    head: str = ""
    """The state it led to; the model must still have it."""

    def find(self, key: str) -> Key | None:
        """The trusted key that is this one."""
        return next((one for one in self.keys if one.key == key), None)


# Keys ----------------------------------------------------------------------------------------------------------------


def new_key(path: Path, name: str) -> Key:
    """Make a key: the private one in a file for its owner alone, the public one beside it, as .pub."""
    if not re.fullmatch(r"\S{1,64}", name) or has_hidden(name):
        raise ModelError(f"a key is named by one word of at most 64 signs, not '{name}'")
    beside = path.with_name(f"{path.name}.pub")
    for one in (path, beside):
        if one.exists() or one.is_symlink():
            raise ModelError(f"{one} is there already; a key is never written over")
    private = Ed25519PrivateKey.generate()
    word = os.environ.get(PASSPHRASE, "").encode()
    lock = serialization.BestAvailableEncryption(word) if word else serialization.NoEncryption()
    text = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)
    made = Key(name, private.public_key().public_bytes_raw().hex())
    atomic.write_new(path, text, mode=0o600)
    atomic.write_new(beside, f"zeroforget-key {made.name} {made.key}\n".encode())
    return made


def public_key(text: str) -> Key:
    """A public key from its file."""
    try:
        content = json_fields.read_bytes(Path(text), _MOST_BYTES).decode()
    except FieldError as error:
        raise ModelError(f"{text} holds no public key: {error.why}") from None
    except UnicodeDecodeError:
        content = ""
    if (found := _LINE.fullmatch(content)) is None or has_hidden(found[1]):
        raise ModelError(f"{text} holds no public key; 'zeroforget key new' writes one, with the ending .pub")
    return Key(found[1], found[2])


def _private(path: Path) -> tuple[Ed25519PrivateKey, str]:
    """A private key, and its name from the file beside it."""
    word = os.environ.get(PASSPHRASE, "").encode() or None
    try:
        private = serialization.load_pem_private_key(json_fields.read_bytes(path, _MOST_BYTES), word)
    except FieldError as error:
        raise ModelError(f"{path} is no private key: {error.why}") from None
    except TypeError as error:
        why = f"it is locked; set {PASSPHRASE}" if word is None else f"it is not locked; unset {PASSPHRASE}"
        raise ModelError(f"{path} cannot be used to sign: {why}") from error
    except ValueError as error:
        raise ModelError(
            f"{path} is no private key, or another word unlocks it; 'zeroforget key new' makes one"
        ) from error
    if not isinstance(private, Ed25519PrivateKey):
        raise ModelError(f"{path} is a key of another kind; 'zeroforget key new' makes one of Ed25519")
    own, name = private.public_key().public_bytes_raw().hex(), path.stem
    with contextlib.suppress(ModelError):
        beside = public_key(str(path.with_name(f"{path.name}.pub")))
        name = beside.name if beside.key == own else name
    return private, name


# Signatures ----------------------------------------------------------------------------------------------------------


def sign(header: bytes, path: Path) -> Signature:
    """Sign an update by its header, which holds the hash of all the rest."""
    private, name = _private(path)
    key = Key(name, private.public_key().public_bytes_raw().hex())
    signed = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return Signature(key, signed, private.sign(_message(header, key, signed)).hex())


def _message(header: bytes, key: Key, signed: str) -> bytes:
    return b"zeroforget update, signed 1\n" + json.dumps([key.name, key.key, signed]).encode() + b"\n" + header


@damage_told()
def read_signature(content: bytes, header: bytes, where: Path) -> Signature:
    """A signature that is right for this header; ModelError for any other."""
    fields = Fields(unsealed(content, where), where)
    if fields.any("format") != "zeroforget signature":
        raise fields.wrong("format", "must be 'zeroforget signature'")
    fields.integer("version", 1, 1)
    key = Key(fields.text("name", most=64), fields.text("key", most=64, like=_KEY))
    made = Signature(key, fields.text("signed", like=_SIGNED), fields.text("signature", most=128, like=_SIGNATURE))
    fields.done()
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key.key))
        public.verify(bytes.fromhex(made.signature), _message(header, key, made.signed))
    except (InvalidSignature, ValueError):
        raise ModelError(
            f"{where} bears a signature of {key.short} that is not right for it; nothing was changed"
        ) from None
    return made


# What a model trusts -------------------------------------------------------------------------------------------------


@damage_told()
def read_trust(folder: Folder) -> Trust:
    """What a model trusts; nothing where no file says so."""
    path = folder.path / TRUST
    if not os.path.lexists(path):  # a link to nothing is no absence
        return Trust()
    fields = Fields(unsealed(read_bytes(path, _MOST_BYTES), path), path)
    if fields.any("format") != "zeroforget trust":
        raise fields.wrong("format", "must be 'zeroforget trust'")
    fields.integer("version", 1, 1)
    keys = tuple(
        Key(one.text("name", most=64), one.text("key", most=64, like=_KEY))
        for one in fields.groups("keys", least=0, most=1000)
    )
    made = Trust(keys, fields.text("signed", like=_SIGNED), fields.text("head", like=re.compile(r"[0-9a-f]{64}|")))
    fields.done()
    return made


def write_trust(folder: Folder, trust: Trust) -> None:
    """Under the lock."""
    head = {"format": "zeroforget trust", "version": 1}
    content = sealed(head | {"keys": [asdict(key) for key in trust.keys], "signed": trust.signed, "head": trust.head})
    atomic.write_bytes(folder.path / TRUST, content)


def change_keys(folder: Folder, change: Callable[[tuple[Key, ...]], tuple[Key, ...]], watch: Watch) -> Trust:
    """Trust other keys from now on."""
    folder.read()
    with changing(folder, watch):
        trust = read_trust(folder)
        made = replace(trust, keys=change(trust.keys))
        write_trust(folder, made)
    return made


def check_origin(trust: Trust, signature: Signature | None, chain: Chain, head: str, path: Path, *, older: bool) -> str:
    """Refuse an update that a model does not trust, and one that would take it back; what is known of its origin."""
    if not trust.keys:
        who = (
            "it is not signed"
            if signature is None
            else f"it is signed by {signature.key.short}, whom nobody trusts here"
        )
        return f"the origin of {path} is unknown: {who}"
    known = " or ".join(key.short for key in trust.keys)
    if signature is None:
        raise ModelError(f"{path} is not signed, and this model takes what {known} signed; nothing was changed")
    key = trust.find(signature.key.key)
    if key is None:
        raise ModelError(
            f"{path} is signed by {signature.key.short}, and this model takes what {known} signed; if that is to be "
            "trusted, 'zeroforget key trust' says so. Nothing was changed"
        )
    has = head in (chain.root, *(task.hash for task in chain.tasks))
    if signature.signed < trust.signed and not has and not older:
        raise ModelError(
            f"{path} was signed on {signature.signed[:19]}, before the newest that this model has received "
            f"({trust.signed[:19]}): it may be an old state that is played again. --older takes it. Nothing was changed"
        )
    return f"{path} is signed by {key.short} on {signature.signed[:19].replace('T', ' ')} UTC"


def received(trust: Trust, signature: Signature | None, head: str, *, new: bool) -> Trust:
    """What a model has been brought to by an update: a `new` one, or one that it had and that was signed later than all
    it knows of, as after a kill between the last task and this note."""
    if signature is None or not trust.keys or not (new or signature.signed > trust.signed):
        return trust
    return replace(trust, signed=max(signature.signed, trust.signed), head=head)
