"""A real Kubernetes API server for tests: etcd, kube-apiserver and, where asked, kube-controller-manager.

The programs are those of $KUBEBUILDER_ASSETS (`setup-envtest use -p path` of controller-runtime prints such a folder). No kubelet
and no scheduler run, so no pod ever starts: tests say what pods and jobs do with `kube_client.play_kubelet`.
"""

import base64
import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kube_process import STOP_SECONDS, ServerProcess
from processes import free_port
from waiting import eventually

VARIABLE = "KUBEBUILDER_ASSETS"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
READY_SECONDS = 60.0
PUBLISHED_SECONDS = 60.0
PAUSE_SECONDS = 10.0

CRDS = Path(__file__).parents[2] / "crds"
API_PATH = "apis/agentrun.dev/v1alpha1"
KINDS = ("AgentRun", "CronTask")
COLLECTORS = ("garbage-collector-controller", "namespace-controller")
"""Controllers that delete what belongs to a deleted owner or namespace."""
WORKLOADS = ("deployment-controller", "replicaset-controller")
"""Controllers that make pods for Deployments. Jobs have none: their status is the test's."""

# Users by their tokens. `operator` has no rights but those that a test binds to it.
ADMIN, OPERATOR = "admin", "operator"


def why_not() -> str | None:
    """The reason why this machine cannot run an API server; None if it can."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} is not set; name a folder with {', '.join(PROGRAMS)}"
    missing = [name for name in PROGRAMS if not os.access(Path(folder) / name, os.X_OK)]
    return f"{VARIABLE}={folder}: not there: {', '.join(missing)}" if missing else None


def program(name: str) -> str:
    return str(Path(os.environ[VARIABLE]) / name)


class KubeError(Exception):
    """A server or kubectl did not do what it was asked for."""


class KubeServer:
    """An API server with its own etcd. Ports, certificates, tokens and data stay the same over stops, kills and starts.

    `arguments` go to kube-apiserver on top of what is needed. RBAC is on, anonymous requests are refused.
    """

    def __init__(self, folder: Path, *, arguments: Sequence[str] = ()) -> None:
        self.folder = folder
        self.port, self._etcd_port, etcd_peers = free_port(), free_port(), free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self._tokens = {ADMIN: secrets.token_hex(16), OPERATOR: secrets.token_hex(16)}
        self.certificate = folder / "certificates" / "apiserver.crt"
        self._kubectl_cache = folder / "kubectl"
        self._arguments = list(arguments)
        self._etcd = ServerProcess(program("etcd"), folder)
        self.apiserver = ServerProcess(program("kube-apiserver"), folder)
        self._controllers: list[ServerProcess] = []
        self._etcd_arguments = [
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{self._etcd_port}",
            f"--advertise-client-urls=http://127.0.0.1:{self._etcd_port}",
            f"--listen-peer-urls=http://127.0.0.1:{etcd_peers}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{etcd_peers}",
            f"--initial-cluster=default=http://127.0.0.1:{etcd_peers}",
            "--unsafe-no-fsync",
            "--log-level=error",
        ]
        self._write_files()

    @property
    def token(self) -> str:
        """The administrator's."""
        return self._tokens[ADMIN]

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.kubeconfig_of(ADMIN)

    def kubeconfig_of(self, user: str) -> Path:
        """A kubeconfig file of ADMIN or OPERATOR."""
        return self.folder / f"kubeconfig-{user}"

    def spawn(self) -> None:
        """Starts what does not run; see `is_ready`."""
        if not self._etcd.running:
            self._etcd.spawn(self._etcd_arguments)
        if not self.apiserver.running:
            key = self.folder / "service-accounts.key"
            self.apiserver.spawn(
                [
                    f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
                    f"--cert-dir={self.certificate.parent}",
                    f"--secure-port={self.port}",
                    "--bind-address=127.0.0.1",
                    f"--token-auth-file={self.folder / 'tokens.csv'}",
                    "--anonymous-auth=false",
                    "--authorization-mode=RBAC",
                    "--disable-admission-plugins=ServiceAccount",  # nobody makes tokens for pods here
                    "--service-cluster-ip-range=10.0.0.0/16",
                    f"--service-account-key-file={key}",
                    f"--service-account-signing-key-file={key}",
                    "--service-account-issuer=https://kubernetes.default.svc",
                    *self._arguments,
                ]
            )

    def is_ready(self) -> bool:
        """Raises KubeError if a process has ended."""
        for process in (self._etcd, self.apiserver):
            if not process.running:
                raise KubeError(f"{process.name} ended:\n{process.tail()}")
        return self._read("/readyz") == b"ok"

    def start_now(self) -> None:
        """Starts and waits, for fixtures of the session."""
        self.spawn()
        self._wait(self.is_ready, within=READY_SECONDS, what="kube-apiserver is ready")

    async def start(self) -> None:
        """Returns when it answers."""
        self.spawn()
        await eventually(self.is_ready, within=READY_SECONDS, what=f"kube-apiserver is ready ({self.apiserver.log})")

    async def stop(self) -> None:
        """The API server ends in order; etcd stays."""
        await self._end(self.apiserver, signal.SIGTERM)

    async def kill(self) -> None:
        """SIGKILL to the API server; etcd stays."""
        await self._end(self.apiserver, signal.SIGKILL)

    async def pause(self) -> None:
        """SIGSTOP: connections stay, and nothing answers any more when this returns."""
        self.apiserver.send(signal.SIGSTOP)
        await eventually(lambda: self.apiserver.stopped, within=PAUSE_SECONDS, what="all threads of kube-apiserver stand still")

    async def resume(self) -> None:
        self.apiserver.send(signal.SIGCONT)

    async def compact(self) -> int:
        """Compacts etcd to its newest revision, which is returned: older resourceVersions are gone (410)."""
        newest = int(self._etcd_call("range", {"key": base64.b64encode(b"\0").decode()})["header"]["revision"])
        self._etcd_call("compaction", {"revision": str(newest), "physical": True})
        return newest

    def start_controllers(self, names: Sequence[str] = COLLECTORS) -> Callable[[], None]:
        """A controller manager with these controllers; returns what stops it again."""
        process = ServerProcess(program("kube-controller-manager"), self.folder)
        process.log = self.folder / f"kube-controller-manager-{len(self._controllers)}.log"
        process.spawn(
            [
                f"--kubeconfig={self.kubeconfig}",
                f"--controllers={','.join(names)}",
                "--leader-elect=false",
                "--secure-port=0",
                "--kube-api-qps=500",
                "--kube-api-burst=1000",
            ]
        )
        self._controllers.append(process)
        return process.end

    def kubectl(self, *arguments: str, stdin: str | None = None, within: float = 60.0) -> str:
        """What kubectl prints. Raises KubeError with what it says on stderr if it fails."""
        told = subprocess.run(
            [program("kubectl"), f"--kubeconfig={self.kubeconfig}", f"--cache-dir={self._kubectl_cache}", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=within,
            check=False,
        )
        if told.returncode:
            raise KubeError((told.stderr or told.stdout).strip())
        return told.stdout

    def apply_crds(self) -> None:
        """Both CRDs, established and published when this returns: discovery and the schemas come after "Established"."""
        self.kubectl("apply", "--server-side", "-f", str(CRDS))
        names = [f"crd/{file.stem}.agentrun.dev" for file in CRDS.glob("*.yaml")]
        self.kubectl("wait", "--for=condition=Established", "--timeout=50s", *names, within=PUBLISHED_SECONDS)
        self._wait(self._is_published, within=PUBLISHED_SECONDS, what="both kinds are in discovery and OpenAPI")
        # kubectl has kept what there was before them, and looks at that first.
        shutil.rmtree(self._kubectl_cache, ignore_errors=True)

    def discard(self) -> None:
        """The end of everything, data included when the folder goes."""
        for process in (*self._controllers, self.apiserver, self._etcd):
            process.end(signal.SIGKILL)

    def _is_published(self) -> bool:
        """Whether discovery, the index of schemas, and the schemas know both kinds."""
        served = self._look(f"/{API_PATH}").get("resources", ())
        indexed = self._look("/openapi/v3").get("paths", {})
        schemas = self._look(f"/openapi/v3/{API_PATH}").get("components", {}).get("schemas", {})
        kinds = {item["kind"] for item in served} & {name.rpartition(".")[2] for name in schemas}
        return set(KINDS) <= kinds and API_PATH in indexed

    def _read(self, path: str) -> bytes:
        """What the administrator reads there; nothing if the answer is an error, or there is none."""
        with contextlib.suppress(OSError, http.client.HTTPException):  # errors of urllib and ssl are OSErrors
            request = urllib.request.Request(f"{self.url}{path}", headers={"Authorization": f"Bearer {self.token}"})
            context = ssl.create_default_context(cafile=str(self.certificate))
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
            with opener.open(request, timeout=2) as answer:
                return bytes(answer.read())
        return b""

    def _look(self, path: str) -> dict[str, Any]:
        text = self._read(path)
        return dict(json.loads(text)) if text else {}

    def _wait(self, condition: Callable[[], bool], *, within: float, what: str) -> None:
        """As `eventually`, for fixtures of the session, which have no event loop."""
        deadline = time.monotonic() + within
        while not condition():
            if time.monotonic() > deadline:
                raise KubeError(f"not within {within:g} s: {what}\n{self.apiserver.tail()}")
            time.sleep(0.05)

    async def _end(self, process: ServerProcess, what: signal.Signals) -> None:
        process.send(signal.SIGCONT)
        process.send(what)
        with contextlib.suppress(AssertionError):
            await eventually(lambda: not process.running, within=STOP_SECONDS, what=f"{process.name} ends")
        process.end(signal.SIGKILL)

    def _etcd_call(self, method: str, body: dict[str, Any]) -> Any:
        url = f"http://127.0.0.1:{self._etcd_port}/v3/kv/{method}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(url, json.dumps(body).encode(), method="POST"), timeout=10) as answer:
            return json.loads(answer.read())

    def _write_files(self) -> None:
        # A P-256 private key is any 32 bytes in this frame (RFC 5915).
        key = bytes.fromhex("30310201010420") + secrets.token_bytes(32) + bytes.fromhex("a00a06082a8648ce3d030107")
        pem = f"-----BEGIN EC PRIVATE KEY-----\n{base64.encodebytes(key).decode()}-----END EC PRIVATE KEY-----\n"
        (self.folder / "service-accounts.key").write_text(pem)
        groups = {ADMIN: "system:masters", OPERATOR: "agentrun"}
        users = [f'{token},{user},{user},"{groups[user]}"\n' for user, token in self._tokens.items()]
        (self.folder / "tokens.csv").write_text("".join(users))
        for user, token in self._tokens.items():
            document = {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "test", "cluster": {"server": self.url, "certificate-authority": str(self.certificate)}}],
                "users": [{"name": user, "user": {"token": token}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": user, "namespace": "default"}}],
                "current-context": "test",
            }
            self.kubeconfig_of(user).write_text(json.dumps(document))
