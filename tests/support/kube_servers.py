"""A real Kubernetes API server for tests: etcd, kube-apiserver and, where asked, kube-controller-manager.

The programs are those of $KUBEBUILDER_ASSETS (`setup-envtest use -p path` of controller-runtime prints such a folder). No kubelet
and no scheduler run, so no pod ever starts: tests say what pods and jobs do with `kube_client.play_kubelet`.
"""

import base64
import contextlib
import json
import os
import secrets
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from processes import free_port
from waiting import eventually

from agentrun.dev import launch

VARIABLE = "KUBEBUILDER_ASSETS"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
READY_SECONDS = 60.0
STOP_SECONDS = 10.0

CRDS = Path(__file__).parents[2] / "crds"
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


class _Process:
    """One server process with its log."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self, arguments: Sequence[str]) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                launch.command([program(self.name), *arguments], last_signal=signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.running else None

    def send(self, what: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(what)

    def end(self, what: signal.Signals = signal.SIGTERM) -> None:
        """Sends the signal, waits, and kills what does not end."""
        if self._process is None:
            return
        self.send(what)
        self.send(signal.SIGCONT)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""


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
        self._arguments = list(arguments)
        self._etcd = _Process("etcd", folder)
        self.apiserver = _Process("kube-apiserver", folder)
        self._controllers: list[_Process] = []
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
        with contextlib.suppress(OSError, urllib.error.URLError, ssl.SSLError):
            request = urllib.request.Request(f"{self.url}/readyz", headers={"Authorization": f"Bearer {self.token}"})
            context = ssl.create_default_context(cafile=str(self.certificate))
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
            with opener.open(request, timeout=2) as answer:
                return bool(answer.read() == b"ok")
        return False

    def start_now(self) -> None:
        """Starts and waits, for fixtures of the session."""
        self.spawn()
        deadline = time.monotonic() + READY_SECONDS
        while not self.is_ready():
            if time.monotonic() > deadline:
                raise KubeError(f"kube-apiserver is not ready after {READY_SECONDS:g} s:\n{self.apiserver.tail()}")
            time.sleep(0.05)

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
        """SIGSTOP: connections stay, nothing answers."""
        self.apiserver.send(signal.SIGSTOP)

    async def resume(self) -> None:
        self.apiserver.send(signal.SIGCONT)

    async def compact(self) -> int:
        """Compacts etcd to its newest revision, which is returned: older resourceVersions are gone (410)."""
        newest = int(self._etcd_call("range", {"key": base64.b64encode(b"\0").decode()})["header"]["revision"])
        self._etcd_call("compaction", {"revision": str(newest), "physical": True})
        return newest

    def start_controllers(self, names: Sequence[str] = COLLECTORS) -> Callable[[], None]:
        """A controller manager with these controllers; returns what stops it again."""
        process = _Process("kube-controller-manager", self.folder)
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

    def kubectl(self, *arguments: str, stdin: str | None = None, within: float = 30.0) -> str:
        """What kubectl prints. Raises KubeError with what it says on stderr if it fails."""
        told = subprocess.run(
            [program("kubectl"), f"--kubeconfig={self.kubeconfig}", f"--cache-dir={self.folder / 'kubectl'}", *arguments],
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
        """Both CRDs, established when this returns."""
        self.kubectl("apply", "--server-side", "-f", str(CRDS))
        names = [f"crd/{file.stem}.agentrun.dev" for file in CRDS.glob("*.yaml")]
        self.kubectl("wait", "--for=condition=Established", "--timeout=20s", *names)

    def discard(self) -> None:
        """The end of everything, data included when the folder goes."""
        for process in (*self._controllers, self.apiserver, self._etcd):
            process.end(signal.SIGKILL)

    async def _end(self, process: _Process, what: signal.Signals) -> None:
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
