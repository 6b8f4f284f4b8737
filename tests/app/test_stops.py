"""Stops end the text in the same place however it is cut, and hold back no more than they must."""

from __future__ import annotations

import random

import pytest

from app.text.stops import PATTERN_HOLD, StopScanner, check_stops
from core.errors import RequestError


def run(scanner: StopScanner, pieces: list[str]) -> tuple[str, str | None]:
    """Everything given out, and the stop."""
    out = ""
    for piece in pieces:
        text, matched = scanner.feed(piece)
        out += text
        if matched is not None:
            return out, matched
    return out + scanner.flush(), None


def expected(text: str, stops: tuple[str, ...], include: bool = False) -> tuple[str, str | None]:
    """The rule, written plainly: first end wins, of equal ends the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, minus, stop = min(ends)
    return text[: end if include else end + minus], stop


def test_text_without_a_stop_passes_at_once() -> None:
    scanner = StopScanner(("STOP",))
    assert scanner.feed("Hello, ") == ("Hello, ", None)
    assert scanner.feed("world") == ("world", None)
    assert scanner.flush() == ""


def test_a_stop_across_pieces_never_shows() -> None:
    scanner = StopScanner(("###",))
    assert scanner.feed("one #") == ("one ", None)
    assert scanner.feed("#") == ("", None)
    assert scanner.feed("# two") == ("", "###")


def test_a_false_start_is_given_out_when_it_is_one() -> None:
    scanner = StopScanner(("abcd",))
    assert scanner.feed("xabc") == ("x", None)
    assert scanner.feed("ab") == ("abc", None)  # "ab" may begin it again
    assert scanner.feed("!") == ("ab!", None)


def test_what_is_held_comes_out_at_the_end() -> None:
    scanner = StopScanner(("abcd",))
    assert scanner.feed("abc") == ("", None)
    assert scanner.flush() == "abc"


def test_the_stop_stays_when_it_is_included() -> None:
    assert run(StopScanner(("end",), include_stop=True), ["the e", "nd of it"]) == ("the end", "end")


def test_the_first_complete_stop_wins_and_then_the_longest() -> None:
    assert run(StopScanner(("abcd", "bc")), ["abcd"]) == ("a", "bc")
    assert run(StopScanner(("bc", "abc")), ["abc"]) == ("", "abc")


@pytest.mark.parametrize("include", [False, True])
def test_random_cuts_agree_with_the_rule(include: bool) -> None:
    draw = random.Random(5)
    for _ in range(2_000):
        alphabet = "ab" if draw.random() < 0.5 else "abé🙂"
        text = "".join(draw.choices(alphabet, k=draw.randrange(1, 60)))
        lengths = draw.choices(range(1, 9), k=draw.randrange(1, 6))
        stops = tuple("".join(draw.choices(alphabet, k=k)) for k in lengths)
        pieces, at = [], 0
        while at < len(text):
            size = draw.randrange(1, 6)
            pieces.append(text[at : at + size])
            at += size
        assert run(StopScanner(stops, include_stop=include), pieces) == expected(text, stops, include)


def test_many_long_stops_that_nearly_match() -> None:
    stops = tuple("a" * 999 + chr(0x100 + i) for i in range(64))
    text = "a" * 3_000 + "b"
    assert run(StopScanner(stops), list(text)) == (text, None)
    assert run(StopScanner(stops), [text, chr(0x13F)]) == (text + chr(0x13F), None)
    assert run(StopScanner(stops), [text[:-1], chr(0x13F), "x"]) == ("a" * 2_001, stops[-1])


def test_a_pattern_stops_the_text() -> None:
    assert run(StopScanner((), (r"\d{3}-\d{4}",)), ["call 55", "5-12", "34 now"]) == ("call ", r"\d{3}-\d{4}")
    scanner = StopScanner((), (r"\d+x",), include_stop=True)
    assert run(scanner, ["é🙂 12", "3x and"]) == ("é🙂 123x", r"\d+x")


def test_a_pattern_longer_than_the_hold_still_stops() -> None:
    long = "<" + "a" * (2 * PATTERN_HOLD) + ">"
    out, matched = run(StopScanner((), ("<a+>",)), ["text ", *long, "more"])
    assert matched == "<a+>"
    assert out.startswith("text <")
    assert len(out) < len("text ") + len(long) - PATTERN_HOLD + 2


@pytest.mark.parametrize(
    "pattern", [r"a+b", r"\bfoo\b", r"^foo", r"foo$", r"(?m)^- x", r"a\B", r"[^a-z ]{2}"]
)
def test_patterns_do_not_depend_on_the_cuts(pattern: str) -> None:
    draw = random.Random(7)
    for _ in range(60):
        text = "".join(draw.choices(["foo", " ", "a", "b", "\n", "- x", "é", "9"], k=25))
        one = run(StopScanner((), (pattern,)), list(text))
        assert run(StopScanner((), (pattern,)), [text]) == one
        assert run(StopScanner((), (pattern,)), [text[i : i + 3] for i in range(0, len(text), 3)]) == one


def test_a_caret_means_the_start_of_the_text() -> None:
    scanner = StopScanner((), ("^x",))
    assert run(scanner, ["a" * 3_000, "x"]) == ("a" * 3_000 + "x", None)


def test_strings_and_patterns_together() -> None:
    assert run(StopScanner(("END",), ("[0-9]",)), ["go EN", "D 1"]) == ("go ", "END")
    assert run(StopScanner(("END",), ("[0-9]",)), ["go 1 END"]) == ("go ", "[0-9]")


@pytest.mark.parametrize(
    ("stops", "patterns", "param"),
    [
        (("",), (), "stop"),
        (("x",) * 65, (), "stop"),
        (("x" * 1_001,), (), "stop"),
        ((), ("(",), "stop_regex"),
        ((), ("x*",), "stop_regex"),
        ((), (r"(a)\1",), "stop_regex"),
        ((), ("((x{1000}){1000}){1000}",), "stop_regex"),
        ((), ("\ud800",), "stop_regex"),
        ((), ("x" * 1_001,), "stop_regex"),
        ((), ("x",) * 9, "stop_regex"),
    ],
)
def test_what_cannot_be_looked_for_is_refused(
    stops: tuple[str, ...], patterns: tuple[str, ...], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check_stops(stops, patterns)
    assert caught.value.param == param


def test_the_limits_themselves_are_fine() -> None:
    check_stops(("x" * 1_000,) * 64, ("a+",) * 8)


def test_a_hostile_pattern_is_linear() -> None:
    # Backtracking would need 2**40 steps.
    assert run(StopScanner((), ("(a+)+$b",)), ["a" * 40] * 5) == ("a" * 200, None)


def test_many_classes_of_unicode_are_refused_unread() -> None:
    check_stops((), (r"\p{Nd}\PN" * 2,))
    with pytest.raises(RequestError, match="at most 16 classes of Unicode") as refused:
        check_stops((), (r"(?i)" + r"\PL" * 320,))
    assert refused.value.param == "stop_regex"


def test_large_patterns_are_for_few_choices() -> None:
    pattern = (r"\b(.*a){100}zz",)
    check_stops((), pattern)
    check_stops((), ("Observation:", "[0-9]+"), choices=128)
    with pytest.raises(RequestError, match=r"too large for 128 choices.*at most 156") as refused:
        check_stops((), pattern, choices=128)
    assert refused.value.param == "stop_regex"
