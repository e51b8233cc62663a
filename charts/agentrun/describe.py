"""Writes README.md and the descriptions in values.schema.json from the comments of values.yaml. Run it with `make chart`."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent
README = """# agentrun

Installs the operator of agentrun and brings in its custom resource definitions. It makes no database and no Redis: each AgentRun names
the Secrets of its own.

    make image IMAGE=registry.example.com/agentrun:0.1.0 && docker push registry.example.com/agentrun:0.1.0
    helm install agentrun charts/agentrun --namespace agentrun-system --create-namespace \\
      --set image.repository=registry.example.com/agentrun --set image.tag=0.1.0
    helm test agentrun --namespace agentrun-system

**CRDs.** A Job applies them before each installation and upgrade, whoever applied them before. CRDs of a newer version stay as they are.
`helm uninstall` keeps them, and with them all AgentRuns. `crds.install=false` leaves them to you, before each installation and upgrade:

    docker run --rm registry.example.com/agentrun:0.1.0 crds | kubectl apply --server-side --force-conflicts -f -

**Upgrades** keep your values and take new ones from the chart: `helm upgrade … --reset-then-reuse-values --set image.tag=…`, or
`-f values.yaml`. See docs/operations.md.

**One namespace, no cluster-wide rights.** `--set 'watchNamespaces={team-a,team-b}'` makes Roles in these namespaces only. The
namespaces and the CRDs have to be there.

**Unknown values are refused.** `values.schema.json` is closed, so a mistyped name is an error and not a default.

## Values

| value | default | what it is |
|---|---|---|
{rows}

This page is made from `values.yaml` by `make chart`.
"""


@dataclass(frozen=True)
class Value:
    """One value with its comment; a block without a comment has an empty one."""

    path: tuple[str, ...]
    comment: str


def values(text: str) -> Iterator[Value]:
    """The keys of a YAML text in block style that stand alone on a line, down to the first that has a comment of its own."""
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    described: int | None = None
    for line in text.splitlines():
        found = re.match(r"( *)(?:# ?(.*)|([A-Za-z]+):.*)$", line)
        if found is None:
            comment = []
            continue
        indent = len(found[1])
        if found[3] is None:
            comment.append(found[2])
            continue
        if described is not None and indent > described:
            continue
        path = [*(one for one in path if one[0] < indent), (indent, found[3])]
        described = indent if comment else None
        yield Value(tuple(name for _, name in path), " ".join(comment))
        comment = []


def readme(found: list[Value], defaults: dict[str, Any]) -> str:
    """The whole page."""
    rows = []
    for value in found:
        if value.comment:
            default = json.dumps(_at(defaults, value.path)).replace("|", "\\|")
            comment = value.comment.replace("|", "\\|")
            rows.append(f"| `{'.'.join(value.path)}` | `{default}` | {comment} |")
    return README.replace("{rows}", "\n".join(rows))


def schema(found: list[Value], before: dict[str, Any]) -> dict[str, Any]:
    """The schema with the comments as descriptions."""
    after: dict[str, Any] = json.loads(json.dumps(before))
    for value in found:
        node = after
        for name in value.path:
            node = node["properties"][name]
        if value.comment:
            node["description"] = value.comment
    return after


def _at(node: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        node = node[name]
    return node


def outputs() -> dict[Path, str]:
    """What is made, by file."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    found, schema_file = list(values(text)), CHART / "values.schema.json"
    described = schema(found, json.loads(schema_file.read_text(encoding="utf-8")))
    return {
        CHART / "README.md": readme(found, yaml.safe_load(text)),
        schema_file: json.dumps(described, indent=2) + "\n",
    }


if __name__ == "__main__":
    for file, content in outputs().items():
        file.write_text(content, encoding="utf-8")
