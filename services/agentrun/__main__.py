"""`python -m agentrun` is the `agentrun` command."""

from agentrun.cli import main

main()
