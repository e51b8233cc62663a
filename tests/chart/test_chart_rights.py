"""What the operator may do: what its code does, and nothing else."""

from collections.abc import Iterable
from typing import Any

import pytest

from agentrun_operator import autoscalers, resources
from agentrun_operator.resources import Resource

Document = dict[str, Any]
Right = tuple[str, str, str]
"""API group, resource, verb."""

READ, WRITE = ("get", "list", "watch"), ("create", "patch", "delete")
ON_NAMESPACES = {
    **dict.fromkeys(resources.OURS, READ),
    **dict.fromkeys(resources.CHILDREN, (*READ, *WRITE)),
    resources.SECRETS: READ,
    resources.PODS: ("list", "patch"),
    resources.EVENTS: ("create",),
    autoscalers.HPAS: ("list",),
}
ON_THE_LEASE = {resources.LEASES: ("get", "create", "update")}


def expected(table: dict[Resource, Iterable[str]]) -> set[Right]:
    rights = {(resource.group, resource.plural, verb) for resource, verbs in table.items() for verb in verbs}
    return rights | {(one.group, f"{one.plural}/status", "patch") for one in resources.OURS if one in table}


def granted(role: Document) -> set[Right]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def roles(found: list[Document]) -> dict[tuple[str, str, str], Document]:
    """Roles of the release by kind, namespace and name, without those of hooks."""
    return {
        (one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]): one
        for one in found
        if one["kind"] in ("Role", "ClusterRole") and "helm.sh/hook" not in one["metadata"].get("annotations", {})
    }


def test_the_operator_may_do_what_it_does_in_all_namespaces(render: Any) -> None:
    found = roles(render({"rbac": {"aggregate": False}}))

    assert found.keys() == {("ClusterRole", "", "agentrun"), ("Role", "agentrun-system", "agentrun-lease")}
    assert granted(found["ClusterRole", "", "agentrun"]) == expected(ON_NAMESPACES)
    assert granted(found["Role", "agentrun-system", "agentrun-lease"]) == expected(ON_THE_LEASE)


def test_in_named_namespaces_there_are_roles_only(render: Any) -> None:
    found = render({"watchNamespaces": ["team-b", "team-a"]})
    made = roles(found)

    assert made.keys() == {
        ("Role", "team-a", "agentrun"),
        ("Role", "team-b", "agentrun"),
        ("Role", "agentrun-system", "agentrun-lease"),
    }
    assert granted(made["Role", "team-a", "agentrun"]) == granted(made["Role", "team-b", "agentrun"]) == expected(ON_NAMESPACES)
    assert not [one for one in found if "namespace" not in one["metadata"]], "something is outside of namespaces"
    (deployment,) = (one for one in found if one["kind"] == "Deployment")
    environment = {one["name"]: one.get("value") for one in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert environment["AGENTRUN_OPERATOR_NAMESPACES"] == "team-a,team-b"


@pytest.mark.parametrize(
    "values", [{}, {"watchNamespaces": ["a"]}, {"serviceAccount": {"create": False, "name": "given"}}], ids=str
)
def test_rights_are_bound_to_the_operators_account(render: Any, values: Document) -> None:
    found = render(values)
    (deployment,) = (one for one in found if one["kind"] == "Deployment")
    account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    bindings = [
        one for one in found if one["kind"].endswith("Binding") and "helm.sh/hook" not in one["metadata"].get("annotations", {})
    ]

    assert {(one["roleRef"]["kind"], one["metadata"].get("namespace", ""), one["roleRef"]["name"]) for one in bindings} == {
        key for key in roles(found) if not key[2].endswith(("-view", "-edit"))
    }
    for binding in bindings:
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "agentrun-system"}]


def test_the_lease_is_the_one_that_the_operator_is_told(render: Any) -> None:
    found = render({"fullnameOverride": "bots"})
    (deployment,) = (one for one in found if one["kind"] == "Deployment")
    environment = {one["name"]: one.get("value") for one in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    rules = roles(found)["Role", "agentrun-system", "bots-lease"]["rules"]

    assert [rule["resourceNames"] for rule in rules if "resourceNames" in rule] == [[environment["AGENTRUN_OPERATOR_LEASE"]]]
    assert all(rule["verbs"] == ["create"] for rule in rules if "resourceNames" not in rule)


def test_without_the_watch_on_secrets_they_are_only_read(render: Any) -> None:
    role = roles(render({"rbac": {"watchSecrets": False}}))["ClusterRole", "", "agentrun"]

    assert expected(ON_NAMESPACES) - granted(role) == {("", "secrets", "list"), ("", "secrets", "watch")}


def test_without_rbac_there_is_none(render: Any) -> None:
    assert roles(render({"rbac": {"create": False}})) == {}


def test_people_get_the_kinds_with_the_clusters_own_roles(render: Any) -> None:
    found = roles(render())
    view, edit = found["ClusterRole", "", "agentrun-view"], found["ClusterRole", "", "agentrun-edit"]

    assert {resource for _, resource, _ in granted(view) | granted(edit)} == {"agentruns", "crontasks"}
    assert {verb for _, _, verb in granted(view)} == set(READ)
    assert not {verb for _, _, verb in granted(edit)} & set(READ), "edit is added to view"
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit["metadata"]["labels"]


def test_the_crd_job_may_change_our_two_crds_only(render: Any) -> None:
    (role,) = (
        one for one in render() if one["kind"] == "ClusterRole" and "helm.sh/hook" in one["metadata"].get("annotations", {})
    )

    assert {verb for _, _, verb in granted(role)} == {"create", "get", "patch"}
    named = [rule for rule in role["rules"] if "resourceNames" in rule]
    assert [rule["verbs"] for rule in role["rules"] if rule not in named] == [["create"]]
    assert named[0]["resourceNames"] == [f"{one.plural}.{one.group}" for one in resources.OURS]
