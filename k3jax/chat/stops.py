"""Search for stop strings in text that comes in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Releases text up to the first stop string.

    Holds back the longest end of the text that a stop string could begin with. The match that
    ends first wins, the longest of those that end together. Cost per character: one step for
    each stop string.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = [(stop, _prefix_function(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # how much of each stop string the text ends with
        self._held = ""
        self.matched: str | None = None  # the stop string that was found

    def feed(self, text: str) -> str:
        """The text that can be shown now; nothing more once a stop string was found."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        pending = self._held + text
        for end in range(len(self._held), len(pending)):
            self._advance(pending[end])
            if self.matched is not None:
                self._held = ""
                return pending[: end + 1 - len(self.matched)]
        keep = max(self._matched)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def finish(self) -> str:
        """The text that was held back, when no more will come."""
        rest, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return rest

    def _advance(self, char: str) -> None:
        # Knuth-Morris-Pratt, one automaton for each stop string.
        for index, (stop, prefix) in enumerate(self._stops):
            length = self._matched[index]
            while length and stop[length] != char:
                length = prefix[length - 1]
            length += stop[length] == char
            self._matched[index] = length
            if length == len(stop) and (self.matched is None or length > len(self.matched)):
                self.matched = stop


def _prefix_function(text: str) -> list[int]:
    """For every end, the length of the longest proper beginning of `text` that ends there too."""
    lengths = [0] * len(text)
    for end in range(1, len(text)):
        length = lengths[end - 1]
        while length and text[length] != text[end]:
            length = lengths[length - 1]
        lengths[end] = length + (text[length] == text[end])
    return lengths
