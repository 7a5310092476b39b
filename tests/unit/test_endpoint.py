"""What guards the endpoint: keys, certificate, and what of a request is passed to the engine."""

import datetime
import hashlib
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from samples import config

from shardbox import ApiConfig, Config, UsageError, api_tls, api_url, read_api_keys


def with_api(folder: Path, **api: Any) -> Config:
    """A configuration in `folder` with this [api]."""
    import dataclasses

    return dataclasses.replace(config(), folder=str(folder), api=ApiConfig(**api))


def test_api_keys_plain_and_hashed_give_the_same_digests(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"open sesame").digest()
    (tmp_path / "keys").write_text(f"# clients\nopen sesame\n\nsha256:{digest.hex()}\n")
    assert read_api_keys(with_api(tmp_path, keys_file="keys")) == [digest, digest]


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_api_keys_file_without_a_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(UsageError, match="holds no key"):
        read_api_keys(with_api(tmp_path, keys_file="keys"))


def test_api_keys_file_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_api_keys(with_api(tmp_path, keys_file="keys"))


def certificate(folder: Path) -> None:
    """A self-signed pair: cert.pem and key.pem."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime(2026, 1, 1)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=36500))
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
    plain = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


def test_api_tls_of_a_good_pair_is_a_context_and_https(tmp_path: Path) -> None:
    certificate(tmp_path)
    settings = with_api(tmp_path, tls_cert="cert.pem", tls_key="key.pem")
    assert api_tls(settings) is not None
    assert api_url(settings, settings.node("alpha")).startswith("https://")


@pytest.mark.parametrize("key", ["cert.pem", "absent.pem"])
def test_api_tls_of_a_bad_pair_is_one_clear_error(tmp_path: Path, key: str) -> None:
    certificate(tmp_path)
    with pytest.raises(UsageError, match="cannot be used"):
        api_tls(with_api(tmp_path, tls_cert="cert.pem", tls_key=key))


def test_api_without_a_certificate_is_plain(tmp_path: Path) -> None:
    assert api_tls(with_api(tmp_path)) is None
