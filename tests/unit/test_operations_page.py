"""What README.md and docs/operations.md let people type agrees with the example and the manifest."""

import re
from pathlib import Path

import pytest
import yaml
from doc_blocks import ROOT, blocks

from agentrun.manifests.loading import agent_run_of, load_one

PAGE = "docs/operations.md"
EXAMPLE = ROOT / "examples" / "cluster" / "agentrun.yaml"
OF_THE_AGENT_RUN = [
    block for heading in ("TLS to the stores", "Network") for block in blocks(PAGE, heading, "yaml") if "of the AgentRun" in block
]


@pytest.mark.parametrize("page", ["README.md", PAGE])
def test_the_secrets_are_those_of_the_example_and_in_its_namespace(page: str) -> None:
    text = Path(ROOT / page).read_text(encoding="utf-8")
    made = re.findall(r"kubectl -n team create secret generic (\S+) --from-(?:literal|file)=([a-z-]+)", text)
    wanted = load_one(EXAMPLE).spec.store_secrets()

    assert {(ref.name, ref.key) for ref in (wanted.database, wanted.redis, wanted.api_keys)} <= set(made)
    assert "kubectl create namespace team\n" in text
    assert f"kubectl -n team apply -f {EXAMPLE.relative_to(ROOT)}\n" in text


@pytest.mark.parametrize("block", OF_THE_AGENT_RUN, ids=["TLS", "egress"])
def test_pieces_of_an_agent_run_are_accepted(block: str) -> None:
    piece = yaml.safe_load(block)["spec"]
    whole = next(yaml.safe_load_all(EXAMPLE.read_text(encoding="utf-8")))
    whole["spec"] |= piece

    spec = agent_run_of(whole).spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    for name, value in piece.items():
        assert set(value) <= set(spec[name])
