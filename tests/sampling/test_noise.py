"""The noise is a fixed function of (seed, position): its bits are part of what a token means."""

import numpy as np
import pytest

from engine.noise import PositionNoise, gumbel

GOLDEN = ["0x1.9ac1b86a071dfp-1", "0x1.83d61a42968edp-1", "0x1.67df449293832p-2"]


def test_bits_are_those_of_philox_with_the_position_in_the_third_word() -> None:
    raw = np.random.Philox(key=11, counter=7 << 128).random_raw(9)
    expected = [((int(bits) >> 12) + 0.5) * 2.0**-52 for bits in raw]
    assert PositionNoise(11).uniforms(7, 9).tolist() == expected


def test_golden_values_hold_on_every_machine_and_numpy_version() -> None:
    got = [float(u).hex() for u in PositionNoise(2**63 - 1).uniforms(123_456, 3)]
    assert got == GOLDEN


def test_noise_does_not_depend_on_what_was_asked_before() -> None:
    noise, fresh = PositionNoise(3), PositionNoise(3)
    for position, size in ((5, 7), (0, 1), (5, 1000), (6, 3)):
        noise.uniforms(position, size)
    assert noise.uniforms(5, 64).tolist() == fresh.uniforms(5, 64).tolist()


def test_a_smaller_vocabulary_sees_a_prefix() -> None:
    noise = PositionNoise(3)
    assert noise.uniforms(5, 64)[:10].tolist() == noise.uniforms(5, 10).tolist()


@pytest.mark.parametrize(("seed", "position"), [(1, 0), (0, 1), (2**63 - 1, 0), (0, 2**40)])
def test_other_seeds_and_positions_have_other_noise_with_no_overlap(seed: int, position: int) -> None:
    ours = set(PositionNoise(0).uniforms(0, 4096).tolist())
    assert not ours & set(PositionNoise(seed).uniforms(position, 4096).tolist())


def test_gumbel_is_finite_at_the_extreme_uniforms() -> None:
    extremes = np.array([0.5 * 2.0**-52, 1.0 - 0.5 * 2.0**-52])
    assert extremes[0] > 0.0
    assert extremes[1] < 1.0
    assert np.isfinite(gumbel(extremes)).all()


def test_gumbel_has_the_mean_and_variance_of_the_standard_distribution() -> None:
    values = gumbel(PositionNoise(1).uniforms(0, 200_000))
    assert values.mean() == pytest.approx(0.5772, abs=0.01)
    assert values.var() == pytest.approx(np.pi**2 / 6, abs=0.02)
