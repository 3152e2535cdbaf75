"""Every parameter of every method on the command line, with the defaults of the library."""

import argparse
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from retopk_jax.attention import (
    AttentionMethod,
    Loki,
    Quest,
    ReTopK,
    SparQ,
    StreamingLLM,
    TokenSelect,
)
from retopk_jax.calibration import LokiBasis, save_basis
from retopk_jax.cli_methods import METHODS, add_method_options, chosen_methods, settings
from retopk_jax.errors import ConfigError


def parse(*options: str) -> dict[str, AttentionMethod]:
    parser = argparse.ArgumentParser()
    add_method_options(parser, default=None)
    return chosen_methods(parser.parse_args(options))


def test_every_field_is_an_option() -> None:
    for name, method in parse().items():
        assert dataclasses.is_dataclass(method)
        options = set(METHODS[name].options) - {"risk_theta", "risk_unchecked"}  # of a file
        assert {f.name for f in dataclasses.fields(method)} == options
        assert set(settings(method)) == options


@pytest.mark.parametrize("method", METHODS)
def test_defaults_are_those_of_the_library(method: str) -> None:
    (made,) = parse("--attention", method).values()
    assert made == METHODS[method].make()


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ("retopk --recall-by recency --tau -1 --refresh 0 --window 0", "ReTopK"),
        ("streaming --sinks 3 --recent 9 --position-mode absolute", "StreamingLLM"),
        (
            "quest --budget 64 --page-size 8 --last-page competes --select-per layer "
            "--dense-layers 2",
            "Quest",
        ),
        ("sparq --budget 40 --components 7 --local 5 --reallocate no", "SparQ"),
        ("tokenselect --initial 3 --selected 8 --local 2 --theta 0.5", "TokenSelect"),
    ],
)
def test_options_are_the_fields(options: str, method: str) -> None:
    want = {
        "ReTopK": ReTopK(recall_by="recency", tau=-1.0, refresh=0, window=0),
        "StreamingLLM": StreamingLLM(3, 9, "absolute"),
        "Quest": Quest(64, 8, "competes", "layer", 2),
        "SparQ": SparQ(40, 7, 5, False),
        "TokenSelect": TokenSelect(3, 8, 2, 0.5),
    }[method]
    (made,) = parse("--attention", *options.split()).values()
    assert made == want


def test_loki_reads_its_basis_and_a_rank_as_a_share(tmp_path) -> None:
    variance = np.array([[[6, 2, 1, 1]]], np.float32)
    path = tmp_path / "basis"
    save_basis(path, LokiBasis(np.eye(4, dtype=np.float32)[None, None], variance, FORMAT))
    base = ("--attention", "loki", "--basis", str(path))
    (made,) = parse(*base, "--rank", "0.8").values()
    assert isinstance(made, Loki)
    assert made.rank == 2
    assert made.basis is not None
    np.testing.assert_array_equal(made.basis, jnp.eye(4)[None, None])
    (made,) = parse(*base, "--rank", "3").values()
    assert isinstance(made, Loki)
    assert made.rank == 3
    assert str(settings(made)["basis"]).startswith("sha256:")


FORMAT = {"format": "retopk-jax loki basis 1"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("quest --theta 0.5", "--theta 0.5 does not apply to --attention quest"),
        ("sparq --local 513", "local=513"),
        ("streaming --position-mode none", "position_mode='none'"),
        ("retopk --recall-by age", "recall_by='age'"),
    ],
)
def test_refuses(options: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse("--attention", *options.split())
