"""Which texts count as right, for answers that are numbers and for those that are words."""

from __future__ import annotations

import pytest

from dflash_backend.evaluation.scoring import is_correct, is_mentioned


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Step 2: 24 - 7 = 17.\nAnswer: 17", "17"),
        ("So the total is \\boxed{1,234} dollars. Step 5 is not needed.", "1234"),
        ("First \\boxed{3}, no: $\\boxed{18.00}$", "18"),
        ("\\boxed{\\$18 \\text{ dollars}}", "18"),
        ("It costs $1,234.50 in the end.", "1234.5"),
        ("We end at -4", "-4"),
        ("**Answer:** 12\nThat was 3 steps.", "12"),
        ("\\boxed{12} and an open \\boxed{13", "12"),
        ("The city is\nParis.", "paris"),
        ("Final answer:  New   York", "new york"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("It takes 30 %.", "30%"),
        (r"\boxed{70{,}000}", "70000"),
        (r"\boxed{70\,000}", "70000"),
        (r"\boxed{10,\!080}", "10080"),
        ("10080", r"10,\!080"),
        (r"\boxed{1\,234\,567.5}", "1234567.5"),
        (r"\boxed{54\text{ cm}^2}", "54"),
        (r"\boxed{54\,\text{cm}^{2}}", "54"),
        (r"\boxed{54 \mathrm{~cm}^3}", r"54\text{ cm}^3"),
        ("\\boxed{54 cm\u00b2}", "54"),
        (r"\boxed{54cm}", "54"),
        (r"\boxed{18 dollars per hour.}", "18"),
        (r"\boxed{\text{18 dollars}}", "18"),
        (r"\boxed{\textbf{18}}", "18"),
        (r"\boxed{3\text{ m}/\text{s}}", "3"),
        (r"\boxed{-\$5}", "-5"),
        (r"\boxed{45^\circ}", "45"),
        (r"\boxed{45^{\circ}}", "45"),
        (r"\boxed{50\%}", "50"),
        (r"\boxed{x = 5}", "5"),
        ("\\boxed{\u22125}", "-5"),
        ("We end at \u22124", "-4"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{-\dfrac{1}{2}}", "-.5"),
        (r"\boxed{\frac12}", "1/2"),
        (r"\boxed{1\tfrac{1}{2}}", "1.5"),
        (r"\boxed{\frac{1,000}{4}}", "250"),
        ("Answer: 1/2", r"\frac{1}{2}"),
        (r"So $x = \frac{3}{6}$.", r"\frac{1}{2}"),
        ("Answer: 70{,}000", "70000"),
        (r"\boxed{x^2}", "x^2"),
        (r"\boxed{3\sqrt{5}}", r"3\sqrt{5}"),
    ],
)
def test_right_answers_are_seen(text: str, answer: str) -> None:
    assert is_correct(text, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", "17"),
        ("Answer: 18", "17"),
        ("17 marbles, but \\boxed{18}", "17"),
        ("17 it is.\nAnswer: unknown", "17"),
        ("17, then 18", "17"),
        ("117", "17"),
        ("Paris\nor Rome", "Paris"),
        (r"\boxed{x^2}", "2"),
        (r"\boxed{2^3}", "3"),
        (r"\boxed{10^{6}}", "6"),
        (r"\boxed{3\sqrt{5}}", "5"),
        (r"\boxed{\sqrt{5}}", "5"),
        (r"\boxed{\frac{1}{2}}", "2"),
        (r"\boxed{\frac{x}{2}}", "2"),
        (r"\boxed{\frac{1}{0}}", "1"),
        (r"\boxed{70{,}000}", "0"),
        (r"\boxed{5\text{ or }600}", "5600"),
        (r"\boxed{5\text{ or }6}", "6"),
        (r"\boxed{5x}", "5"),
        (r"\boxed{2\pi}", "2"),
        (r"\boxed{(3, 4)}", "4"),
        (r"\boxed{}", "4"),
        ("Answer: 17 Oak Road", "17 Main Street"),
        ("\\boxed{" + "9" * 5000 + "}", "9"),
        ("9" * 5000, "9"),
        ("", "Paris"),
    ],
)
def test_wrong_answers_are_not(text: str, answer: str) -> None:
    assert not is_correct(text, answer)


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("The capital of France is **Paris**.", "paris", True),
        ("A Parisian said so.", "Paris", False),
        ("They take in carbon\n dioxide (CO2).", "Carbon Dioxide", True),
        ("It boils at 100°C.", "100", True),
        ("Of 7, 8 are left", "7", True),
        ("1,100", "100", False),
        ("100.5", "100", False),
        ("0.100", "100", False),
        ("1100", "100", False),
        ("100 (or 1.5)", "1.5", True),
        ("", "Paris", False),
    ],
)
def test_what_a_text_mentions_is_whole(text: str, words: str, expected: bool) -> None:
    assert is_mentioned(text, words) == expected
