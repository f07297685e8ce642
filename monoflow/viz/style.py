"""The look of a page, by day and by night, on a desk and on a phone."""

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c2733; --dim: #66727f; --line: #d9dee3;
  --bad: #c62828; --b: #d5dae0; --s0: #97d2a3; --s1: #8db9f0; --s2: #cdaaf0; --s3: #ecd77a; --p: #f4b183;
  --p2: #e08e54; --c0: #5b8bd0; --c1: #9a7fc7; --c2: #c96f6f; --c3: #8fc3a0; --c4: #e0a458; --c5: #b0a58f;
  --c6: #7fb8c4; --c7: #d69ac0; }
@media (prefers-color-scheme: dark) { :root { --page: #14191f; --ink: #dde4ea; --dim: #8d9aa7;
  --line: #323c46; --bad: #ff7b72; --b: #4a545f; --s0: #2f7f45; --s1: #2f66ad; --s2: #744bab; --s3: #8a7417;
  --p: #a55a22; --p2: #7d3f10; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; background: var(--page); color: var(--ink); max-width: 72rem;
  margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2.4rem 0 0; }
.note, .dim { color: var(--dim); } .note { margin: 0 0 .6rem; font-size: .87rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .16rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; } td.n, th.n { text-align: right; }
td.sbp { text-align: center; min-width: 4.2rem; border: 2px solid var(--page); border-radius: .3rem; }
td.gap { border: 0; padding: 0 .3rem; }
.b { background: var(--b); } .s0 { background: var(--s0); } .s1 { background: var(--s1); }
.s2 { background: var(--s2); } .s3 { background: var(--s3); }
.p { background: repeating-linear-gradient(45deg, var(--p) 0 6px, var(--p2) 6px 9px); }
.key { display: inline-block; margin-right: 1.1em; white-space: nowrap; }
.key i { display: inline-block; width: .9em; height: .9em; margin-right: .35em; vertical-align: -1px;
  border-radius: 2px; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.card { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .9rem; }
.card b { display: block; font-size: 1.25rem; } .card span { color: var(--dim); font-size: .87rem; }
.over { color: var(--bad); fill: var(--bad); } line.over { stroke: var(--bad); stroke-dasharray: 6 4; }
svg { width: 100%; min-width: 44rem; height: auto; display: block; }
svg text { font-size: 12px; fill: var(--ink); paint-order: stroke; stroke: var(--page); stroke-width: 4px; }
svg text.dim { fill: var(--dim); }
svg text.over { fill: var(--bad); } .grid { stroke: var(--line); } .mark { fill: var(--ink); }
.lane { fill: var(--line); opacity: .45; } .hover { fill: transparent; }
.hover:hover { fill: var(--ink); opacity: .18; }
.scroll td:first-child { position: sticky; left: 0; background: var(--page); }
@media (max-width: 40rem) { .scroll table { font-size: .74rem; } th, td { padding: .14rem .25rem; }
  td.sbp { min-width: 2.3rem; padding: .14rem .1rem; } td.gap, th.gap { padding: 0 .1rem; }
  .card { flex: 1 1 40%; } svg { min-width: 38rem; } th { white-space: normal; } }
""" + "\n".join(
    f".{prefix}{number} {{ fill: var(--c{colour}); background: var(--c{colour}); }}"
    for prefix, colours in (("c", range(8)), ("l", (0, 5, 4, 2, 3, 1, 6, 7)), ("f", (5, 3, 4, 0, 1)))
    for number, colour in enumerate(colours)
)
