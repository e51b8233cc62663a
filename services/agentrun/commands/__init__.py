"""Commands for people that ask a running gateway."""
