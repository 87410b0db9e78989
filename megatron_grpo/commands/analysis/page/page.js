"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const plots = [];
const dashes = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
const LONG = 60; // points: a longer curve is pale, with its moving mean

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function short(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size >= 1e4) return value.toLocaleString("en");
  return size < 1e-3 && value ? value.toExponential(1) : String(+value.toPrecision(4));
}

function movingMean(values) { // over a twentieth of the points
  const size = Math.max(1, Math.round(values.filter(value => value != null).length / 20));
  const last = [];
  let sum = 0;
  return values.map(value => {
    if (value == null) return null;
    last.push(value);
    sum += value;
    if (last.length > size) sum -= last.shift();
    return sum / last.length;
  });
}

function draw(box, figure) {
  const several = new Set(figure.series.map(curve => curve.run)).size > 1;
  const values = [figure.values[0]];
  const series = [{ label: "step" }];
  figure.series.forEach((curve, at) => {
    const colour = css("--c" + (several ? curve.run : curve.place) % 6);
    const points = figure.values[at + 1];
    const count = points.filter(value => value != null).length;
    const common = { spanGaps: true, value: (plot, value) => short(value) };
    const isLong = !curve.dots && !figure.exact && count >= LONG;
    if (isLong) {
      values.push(points);
      series.push({ ...common, label: curve.label, pale: true, stroke: colour + "55", width: 1, points: { show: false } });
    }
    values.push(isLong ? movingMean(points) : points);
    series.push({
      ...common, label: curve.label, stroke: colour, width: 2, dash: several ? dashes[curve.place % 4] : [],
      points: { show: curve.dots || count < 30, size: 6, fill: colour },
    });
  });
  const axis = { stroke: css("--pale"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
  const powersOfTen = (plot, found) => found.map(tick => figure.log && Math.abs(Math.log10(tick) % 1) > 1e-6 ? null : tick);
  const vertical = { ...axis, size: 62, grid: { ...axis.grid, filter: powersOfTen }, ticks: { ...axis.ticks, filter: powersOfTen } };
  const ticks = (plot, found) => found.map(tick => tick == null ? "" : short(tick));
  box.replaceChildren();
  plots.push(new uPlot({
    width: Math.max(200, box.clientWidth), height: 220, series,
    scales: { x: { time: false }, y: figure.log ? { distr: 3 } : {} },
    axes: [{ ...axis, size: 34, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] }, { ...vertical, values: ticks }],
    cursor: { sync: { key: "steps" } },
  }, values, box));
  box.querySelectorAll(".u-series").forEach((row, at) => { row.hidden = Boolean(series[at].pale); });
}

function drawAll() {
  plots.splice(0).forEach(plot => plot.destroy());
  document.querySelectorAll(".plot").forEach((box, at) => draw(box, data[at]));
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  drawAll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
let waiting;
let width = innerWidth;
addEventListener("resize", () => { // a phone also reports a change of height, whenever its address bar hides
  if (innerWidth === width) return;
  width = innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(drawAll, 150);
});
drawAll();
