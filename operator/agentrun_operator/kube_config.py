"""Where the API server is and who we are there: from kubeconfig files, or from the pod's service account."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kubernetes.aio import client, config

from agentrun.domain.errors import ConfigurationError


async def configuration(kubeconfig: Sequence[Path] = ()) -> client.Configuration:
    """Address and credentials, from kubeconfig files or from the pod's service account. Raises ConfigurationError."""
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


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the API server is and who we are there, for a client that is not this module."""

    server: str
    ca_path: str | None
    insecure: bool
    token: str | None = field(repr=False)
    certificate_path: str | None
    private_key_path: str | None
    proxy_url: str | None


async def connection(kubeconfig: Sequence[Path] = ()) -> Connection:
    """Read anew at each call, since tokens are replaced while a process runs. Raises ConfigurationError."""
    found = await configuration(kubeconfig)
    header: str | None = await found.get_api_key_with_prefix("BearerToken")
    return Connection(
        server=str(found.host),
        ca_path=found.ssl_ca_cert,
        insecure=not found.verify_ssl,
        token=header.split(" ", 1)[-1] if header else None,
        certificate_path=found.cert_file,
        private_key_path=found.key_file,
        proxy_url=found.proxy,
    )
