"""Where the API server is and who we are there: from kubeconfig files, or from the pod's service account."""

import ssl
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kubernetes.aio import client, config

from agentrun.domain.errors import ConfigurationError


class Access:
    """The way to the API server. Credentials that expire are read anew."""

    def __init__(self, found: client.Configuration) -> None:
        self._found = found
        self.server = str(found.host).rstrip("/")
        self.server_name: str | None = found.tls_server_name
        """The name in the server's certificate, where it is not that of its URL."""
        self.proxy: str | None = found.proxy or _proxy_for(self.server)
        self.proxy_headers: Mapping[str, str] | None = found.proxy_headers
        self.connections = int(found.connection_pool_maxsize)
        """The most that are open at the same time."""

    async def authorization(self) -> str | None:
        """The value of the header of this name. Raises ConfigurationError if it cannot be renewed."""
        try:
            header: str | None = await self._found.get_api_key_with_prefix("BearerToken")
        except (config.ConfigException, OSError, ValueError) as error:
            raise ConfigurationError(f"the credentials for the API server cannot be renewed: {error}") from None
        return header

    def tls(self) -> ssl.SSLContext:
        """Whom we trust, and our certificate if we have one."""
        found = self._found
        context = ssl.create_default_context(cafile=found.ssl_ca_cert, cadata=found.ca_cert_data)
        if found.cert_file:
            context.load_cert_chain(found.cert_file, keyfile=found.key_file)
        if not found.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if found.disable_strict_ssl_verification:
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context


async def access(kubeconfig: Sequence[Path] = ()) -> Access:
    """From kubeconfig files or from the pod's service account. Raises ConfigurationError."""
    return Access(await _configuration(kubeconfig))


async def _configuration(kubeconfig: Sequence[Path]) -> client.Configuration:
    found = client.Configuration()
    try:
        if kubeconfig:
            files = ":".join(map(str, kubeconfig))
            await config.load_kube_config(config_file=files, client_configuration=found)  # type: ignore[no-untyped-call]
        else:
            config.load_incluster_config(client_configuration=found)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError, ValueError) as error:
        source = f"KUBECONFIG={':'.join(map(str, kubeconfig))}" if kubeconfig else "the pod's service account"
        raise ConfigurationError(
            f"{source}: {error}; run in a pod with a service account, or set KUBECONFIG to a kubeconfig file"
        ) from None
    return found


def _proxy_for(server: str) -> str | None:
    """What HTTPS_PROXY and NO_PROXY say. Found once: looking for it at each request is as dear as the request."""
    url = urlsplit(server)
    if urllib.request.proxy_bypass(url.netloc):
        return None
    return urllib.request.getproxies().get(url.scheme)


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the API server is and who we are there, for a client that is not ours."""

    server: str
    ca_path: str | None
    insecure: bool
    token: str | None = field(repr=False)
    certificate_path: str | None
    private_key_path: str | None
    proxy_url: str | None


async def connection(kubeconfig: Sequence[Path] = ()) -> Connection:
    """Read anew at each call, since tokens are replaced while a process runs. Raises ConfigurationError."""
    found = await _configuration(kubeconfig)
    way = Access(found)
    header = await way.authorization()
    return Connection(
        server=way.server,
        ca_path=found.ssl_ca_cert,
        insecure=not found.verify_ssl,
        token=header.split(" ", 1)[-1] if header else None,
        certificate_path=found.cert_file,
        private_key_path=found.key_file,
        proxy_url=way.proxy,
    )
