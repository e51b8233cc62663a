"""`agentrun` commands that ask a gateway, as processes. No tests in here."""

import asyncio
import os
import sys


async def command(url: str, key: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "agentrun",
        *arguments,
        env={**os.environ, "AGENTRUN_URL": url, "AGENTRUN_API_KEY": key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()
