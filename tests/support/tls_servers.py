"""A Postgres and a Redis that speak TLS, with certificates of an authority made on the spot. Needs `openssl`.

Their certificate is for the host `localhost`, so 127.0.0.1 is a name that it does not hold.
"""

import contextlib
import os
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
from processes import free_port
from store_servers import VARIABLE, private_server, short_folder

from agentrun.dev.binaries import unprivileged_account
from agentrun.dev.servers import Postgres, Redis

PASSWORD = "word-of-tls"


def why_no_tls() -> str | None:
    """The reason why the programs at hand speak no TLS; None if they do."""
    if os.environ.get(VARIABLE) != "system":
        return f"Postgres and Valkey of the wheels are built without TLS; {VARIABLE}=system takes those of the system"
    return None


@dataclass(frozen=True)
class TlsServers:
    """URLs without any query; Postgres lets nobody in without TLS and the password, on TCP."""

    database_url: str
    redis_url: str
    authority: Path
    """The certificate that both servers' certificates are signed by."""
    other_authority: Path
    """One that has signed neither."""


@contextlib.asynccontextmanager
async def tls_servers() -> AsyncIterator[TlsServers]:
    """Both, started, with an empty database."""
    with short_folder() as folder:
        authority, other = _authority(folder, "authority"), _authority(folder, "other")
        certificate, key = _server_certificate(folder, authority)
        access = folder / "pg_hba.conf"
        access.write_text("local all all trust\nhostssl all all all scram-sha-256\n")
        access.chmod(0o644)
        postgres_port, redis_port = str(free_port()), str(free_port())
        postgres_settings = {
            "listen_addresses": "127.0.0.1",
            "port": postgres_port,
            "ssl": "on",
            "ssl_cert_file": str(certificate),
            "ssl_key_file": str(key),
            "hba_file": str(access),
        }
        redis_settings = {
            "bind": "127.0.0.1",
            "tls-port": redis_port,
            "tls-cert-file": str(certificate),
            "tls-key-file": str(key),
            "tls-ca-cert-file": str(authority),
            "tls-auth-clients": "no",
        }
        async with private_server(Postgres, postgres_settings) as postgres, private_server(Redis, redis_settings):
            conn = await asyncpg.connect(postgres.url, port=int(postgres_port))
            await conn.execute(f"ALTER ROLE postgres PASSWORD '{PASSWORD}'")
            await conn.close()
            yield TlsServers(
                f"postgresql://postgres:{PASSWORD}@localhost:{postgres_port}/postgres",
                f"rediss://localhost:{redis_port}/0",
                authority,
                other,
            )


def _authority(folder: Path, name: str) -> Path:
    certificate = folder / f"{name}.crt"
    _openssl(
        "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign", "-keyout", str(folder / f"{name}.key"), "-out", str(certificate),
    )  # fmt: skip
    return certificate


def _server_certificate(folder: Path, authority: Path) -> tuple[Path, Path]:
    request, certificate, key, names = (folder / f"server.{end}" for end in ("csr", "crt", "key", "ext"))
    names.write_text("subjectAltName=DNS:localhost\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n")  # RFC 5280, 4.2.1
    _openssl(
        "req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", str(key), "-out", str(request)
    )  # fmt: skip
    _openssl(
        "x509", "-req", "-days", "2", "-in", str(request), "-out", str(certificate), "-extfile", str(names),
        "-CA", str(authority), "-CAkey", str(authority.with_suffix(".key")), "-CAcreateserial",
    )  # fmt: skip
    if (
        account := unprivileged_account()
    ):  # Postgres refuses a key that others may read; Redis is started by whoever runs the tests
        os.chown(key, account.uid, account.gid)
    return certificate, key


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, text=True, timeout=60)
