"""The report's picture of agreeing logprobs."""

from reports.agreement import HEIGHT, TOP, agreement_words, draw_agreement
from reports.html import render_report
from reports.reader import read_as
from reports.record import Agreement

import run_samples  # isort: skip

AGREEMENT = {
    "tokens": 4, "equal": 1, "kl_k1": 1e-7, "kl_k3": 2e-13, "max_delta": 4e-6, "mean_delta": 1e-6,
    "perplexity_ratio": 1.0000001, "pearson": 0.99999999,
    "by_position": [{"position": 0, "tokens": 2, "mean": 0.0, "most": 0.0},
                    {"position": 1, "tokens": 2, "mean": 2e-6, "most": 4e-6}],
}  # fmt: skip


def test_the_largest_difference_reaches_the_top_and_none_lies_on_the_axis():
    picture = draw_agreement(read_as(Agreement, AGREEMENT))
    heights = [float(place.split()[1]) for place in picture.most.removeprefix("M").split(" L")]
    assert heights[1] == TOP
    assert heights[0] > HEIGHT / 2
    assert [mark.text for mark in picture.y] == ["0", "1e-06", "2e-06", "3e-06", "4e-06"]


def test_equal_everywhere_is_a_sentence_and_no_picture():
    equal = AGREEMENT | {"equal": 4, "by_position": [{"position": 0, "tokens": 4, "mean": 0.0, "most": 0.0}]}
    assert draw_agreement(read_as(Agreement, equal)) is None
    assert "4 of 4 logprobs have the same bits" in agreement_words(read_as(Agreement, equal))


def test_the_page_shows_numbers_and_picture_of_a_cell_that_has_them():
    verdict = run_samples.verdict() | {"agreement": AGREEMENT}
    page = render_report(run_samples.run([verdict]))
    assert "1 of 4 logprobs have the same bits" in page
    assert "Largest and mean difference of logprobs" in page
    assert "Agreement of logprobs" not in render_report(run_samples.run([run_samples.verdict()]))
