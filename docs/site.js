// Wide tables scroll inside a box that the theme makes: the keyboard must reach it (axe: scrollable-region-focusable).
const reachable = () => document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code").forEach((box) => { box.tabIndex = 0; });
new MutationObserver(reachable).observe(document.body, { childList: true, subtree: true });
reachable();
