"""Files of certificates that a URL names. The TLS library's own errors about them hold neither the file's name nor what was expected."""

from collections.abc import Mapping


def wrong_file(named: Mapping[str, str], *, authorities: frozenset[str]) -> str | None:
    """What is wrong with the first of these files (path by parameter) that cannot be used; None if each can be.

    Those in `authorities` have to hold a certificate, of any other it is only seen that it can be read.
    """
    for parameter, path in named.items():
        try:
            with open(path, "rb") as file:
                content = file.read()
        except (OSError, ValueError) as error:
            return f"{parameter} {path}: {getattr(error, 'strerror', None) or error}"
        if parameter in authorities and b"-----BEGIN" not in content:
            return f"{parameter} {path}: no certificate in it (-----BEGIN CERTIFICATE-----)"
    return None
