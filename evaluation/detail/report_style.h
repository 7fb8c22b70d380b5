// The report's style sheet: system fonts, light and dark by preference, one column on a phone.
#pragma once

namespace emend::evaluation::detail {

inline constexpr const char* kReportStyle = R"css(
:root{color-scheme:light dark;--bg:#f7f7f5;--card:#fff;--ink:#1d1f23;--soft:#5d636d;--line:#dfe1e4;--good:#17734a;--bad:#b3261e;
--good-bg:#e3f3ea;--bad-bg:#fbe9e7;--c0:#2463b8;--c1:#c2570c;--c2:#17734a;--c3:#8a3fa0;--c4:#9a7200;--c5:#0b7f8c;--c6:#b0305f;--c7:#5d636d}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1e2125;--ink:#e8e9eb;--soft:#a2a8b1;--line:#353a41;--good:#6fd3a0;--bad:#ff9a90;
--good-bg:#16362a;--bad-bg:#432321;--c0:#7db0f5;--c1:#f5a25d;--c2:#6fd3a0;--c3:#cf9ae3;--c4:#e3c25a;--c5:#5ecbd8;--c6:#f28bb0;--c7:#a2a8b1}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:1.55rem;line-height:1.25;margin:.2em 0 .3em}h2{font-size:1.2rem;margin:2em 0 .6em}h3{font-size:1rem;margin:0 0 .5em}
p{margin:.4em 0}.soft{color:var(--soft)}.small{font-size:.86rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(145px,1fr));gap:10px;margin:16px 0}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px;min-width:0}
.tile b{display:block;font-size:1.7rem;line-height:1.2;font-variant-numeric:tabular-nums}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr));gap:10px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:12px}
.card{overflow-wrap:anywhere}.card p{margin:.25em 0}
.failed{border-color:var(--bad);border-left-width:4px}.reason{color:var(--bad)}
.after{background:var(--good-bg);border-radius:3px;padding:0 .2em}.before{color:var(--soft)}
.failed .after{background:var(--bad-bg)}
.said{display:grid;grid-template-columns:3.6rem 1fr;gap:6px;align-items:baseline;margin:.25em 0}.tag{color:var(--soft);font-size:.86rem}
.prob{display:grid;grid-template-columns:3.6rem 1fr 4.6rem;gap:6px;white-space:nowrap;align-items:center;font-size:.86rem;color:var(--soft)}
.meter{height:8px;border-radius:4px;background:var(--line);overflow:hidden}.meter i{display:block;height:100%;background:var(--c0)}
.meter i.old{background:var(--c7)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px;text-align:right;border-bottom:1px solid var(--line);vertical-align:top;white-space:nowrap;overflow-wrap:normal}
td:first-child,td.text{white-space:normal}td.text{min-width:9em;overflow-wrap:anywhere}
th:first-child,td:first-child,td.text,th.text{text-align:left}th{font-weight:600;color:var(--soft)}
abbr[title]{text-decoration:underline dotted;text-underline-offset:3px;cursor:help}
.up{color:var(--good)}.down{color:var(--bad)}
svg{width:100%;height:auto;display:block}svg text{font-size:13px;fill:var(--soft)}svg .name{fill:var(--ink)}
.grid{stroke:var(--line);stroke-width:1}.axis,.frame{stroke:var(--soft);stroke-width:1;fill:none}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round}.line.faint{stroke-width:1;opacity:.28}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:.86rem;color:var(--soft);margin-top:4px}
.key{display:inline-block;width:14px;height:4px;border-radius:2px;margin-right:6px;vertical-align:middle}
.key.faint{opacity:.4;height:2px}
.ramp{display:inline-block;width:90px;height:10px;border-radius:2px;vertical-align:middle}
.bar{display:grid;grid-template-columns:minmax(70px,120px) 1fr 10.5em;gap:8px;align-items:center;font-size:.9rem;margin:6px 0}
.bar .track{display:flex;height:16px;background:var(--line);border-radius:3px;overflow:hidden;position:relative}
.bar .track i{display:block;height:100%}.bar .value{text-align:right;white-space:nowrap;overflow:hidden;text-overflow:ellipsis;font-variant-numeric:tabular-nums}
.map{display:flex;flex-wrap:wrap;gap:3px}.map span{min-width:34px;padding:3px 5px;border-radius:4px;font-size:.8rem;text-align:center;border:2px solid transparent;background:var(--line)}
.map span.edited{border-color:var(--ink);font-weight:700}
pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px;overflow-x:auto;font-size:.86rem;white-space:pre-wrap;overflow-wrap:anywhere}
details{margin:.6em 0}summary{cursor:pointer;color:var(--c0)}
dl{display:grid;grid-template-columns:minmax(90px,max-content) 1fr;gap:2px 16px;font-size:.92rem;margin:.5em 0}dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
@media(max-width:560px){.bar{grid-template-columns:72px 1fr 8.6em;font-size:.84rem}dl{grid-template-columns:1fr}dd{margin-bottom:.4em}th,td{padding:6px 5px}.hide-narrow{display:none}}
@media print{body{background:#fff}.card,.tile{break-inside:avoid}details{display:block}}
)css";

/// Rules for one of the eight series colours; '@' stands for its number.
inline constexpr const char* kSeriesRule =
    ".line.c@{stroke:var(--c@)}svg .fill.c@{fill:var(--c@)}.key.c@,.track .c@{background:var(--c@)}"
    ".ramp.c@{background:linear-gradient(90deg,transparent,var(--c@))}.map .c@{background:color-mix(in srgb,var(--c@) "
    "28%,var(--card))}";

}  // namespace emend::evaluation::detail
