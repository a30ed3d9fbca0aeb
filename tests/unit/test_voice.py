"""Log lines are seen in scripts that never configured logging, and only there."""

import logging

import pytest

from phalanx.comm.local.logging_setup import speak


@pytest.fixture
def bare_logging(monkeypatch):
    """Take all handlers away when called: pytest puts its own back before each test begins."""
    logger = logging.getLogger("phalanx")
    level = logger.level

    def bare():
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        monkeypatch.setattr(logger, "handlers", [])
        return logger

    yield bare
    logger.setLevel(level)


def test_rank_0_speaks_and_the_others_only_warn(bare_logging, capsys):
    logger = bare_logging()
    speak(0)
    speak(0)
    logging.getLogger("phalanx.parallel").info("global batch 64")
    assert capsys.readouterr().err.count("] global batch 64") == 1
    logger.handlers.clear()
    speak(1)
    logging.getLogger("phalanx.parallel").info("global batch 64")
    logging.getLogger("phalanx.parallel").warning("careful")
    said = capsys.readouterr().err
    assert "global batch" not in said
    assert "careful" in said


def test_it_falls_silent_when_the_script_configures_logging(bare_logging, capsys):
    bare_logging()
    speak(0)
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger("phalanx").info("twice")
    assert "twice" not in capsys.readouterr().err


def test_a_script_that_configured_logging_is_left_alone(bare_logging):
    logger = bare_logging()
    logging.getLogger().addHandler(logging.NullHandler())
    speak(0)
    assert not logger.handlers
