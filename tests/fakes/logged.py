"""What was logged while a test ran."""

from __future__ import annotations

import logging

import pytest


def logged(caplog: pytest.LogCaptureFixture, logger: str) -> list[logging.LogRecord]:
    """By one logger: others may have been made talkative by tests that ran before in this process."""
    return [record for record in caplog.records if record.name == logger]
