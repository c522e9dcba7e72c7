"""Which pictures of a piece of HTML have a text alternative."""

from html.parser import HTMLParser


class Pictures(HTMLParser):
    """Counts <img> and <svg> that neither carry nor stand in something with a text alternative."""

    VOID = {"img", "br", "hr", "input", "meta", "link", "source", "col", "wbr"}

    def __init__(self, html):
        super().__init__()
        self.described, self.bare = [], 0  # for each open tag: is it described?
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        label = "alt" if tag == "img" else "aria-label"
        inside = any(self.described)
        described = inside or bool((given.get(label) or given.get("aria-label") or "").strip())
        if tag in ("img", "svg") and not described:
            self.bare += 1
            described = True  # its content is not counted again
        if tag not in self.VOID:
            self.described.append(described)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID and self.described:
            self.described.pop()
