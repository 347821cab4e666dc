"""The look of figures: colours told apart by everybody, log scales that say so."""

from itertools import combinations

import pytest

from fastweights.style import COLOURS, log_scale, look_of, new_figure, quiet

# What is left of red, green and blue, as light, for people without the cones for long or medium waves (Viénot et al.,
# 1999), and for people who see light and dark alone.
DEFECTS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1)),
    "deuteranopia": ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1)),
}


def linear(colour: str) -> list[float]:
    return [(int(colour[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)]


def seen(colour: str, defect: str) -> list[float]:
    light = linear(colour)
    rows = DEFECTS[defect]
    return [max(0.0, sum(a * b for a, b in zip(row, light, strict=True))) ** (1 / 2.2) for row in rows]


@pytest.mark.parametrize("defect", DEFECTS)
def test_colours_are_told_apart(defect):
    for a, b in combinations(COLOURS, 2):
        apart = sum((x - y) ** 2 for x, y in zip(seen(a, defect), seen(b, defect), strict=True)) ** 0.5
        assert apart > 0.12, (a, b, defect)


def test_the_check_of_colours_can_fail():
    """A red and a green of the same lightness, which is how figures go wrong."""
    a, b = (seen(colour, "deuteranopia") for colour in ("#c83c3c", "#7d7d3c"))
    assert sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5 < 0.12


def test_many_classes_look_different():
    looks = [tuple(look_of(n).items()) for n in range(50)]
    assert len(set(looks)) == 50


@pytest.mark.parametrize(("last", "ticks"), [(5.0, "1"), (2e6, "1M")])
def test_a_log_scale_says_so_in_plain_numbers(last, ticks):
    figure = new_figure(3, 2)
    axes = quiet(figure.subplots())
    axes.plot([0.5, last], [1, 2])
    log_scale(axes, "x", "tasks")
    figure.canvas.draw()
    assert axes.get_xlabel() == "tasks, log scale"
    assert axes.get_xscale() == "log"
    assert ticks in [text.get_text() for text in axes.get_xticklabels()]
    assert not axes.spines["top"].get_visible()
