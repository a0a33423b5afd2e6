// Draws the curves of a report and says what they are where the pointer is. The data stands in the page, as JSON.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const MARGIN = { left: 52, right: 14, top: 10, bottom: 24 };
  const state = { axis: data.axis, hidden: new Set() };
  const charts = [];

  const make = (name, attributes = {}, parent = null) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (parent) parent.append(element);
    return element;
  };

  const text = (parent, x, y, words, anchor) => {
    make("text", { x, y, "text-anchor": anchor }, parent).textContent = words;
  };

  const short = (value, digits = 4) => {
    const size = Math.abs(value);
    for (const [limit, divisor, unit] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) {
      if (size >= limit) return `${+(value / divisor).toPrecision(digits)}${unit}`;
    }
    return `${+value.toPrecision(digits)}`;
  };

  // Labels with as many digits as tell values apart; of those that rounding alone has made differ the first has one.
  const labels = (values, digits = 4) => {
    const words = values.map((value) => short(value, digits));
    if (digits < 6 && new Set(words).size < words.length) return labels(values, digits + 1);
    return words.map((word, i) => (words.indexOf(word) === i ? word : ""));
  };

  const time = (hours) => {
    const seconds = hours * 3600;
    if (seconds < 90) return `${+seconds.toPrecision(3)} s`;
    return seconds < 5400 ? `${+(seconds / 60).toPrecision(3)} min` : `${+hours.toPrecision(3)} h`;
  };

  const place = (value) => (state.axis === "hours" ? time(value) : short(value));

  // Round numbers between two others, about `count` of them.
  const ticks = (low, high, count) => {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 5].find((factor) => factor * power >= rough) || 10);
    const found = [];
    for (let i = Math.ceil(low / step); i * step <= high && found.length < 20; i += 1) found.push(i * step);
    return found;
  };

  // The same of times, in whole seconds, minutes or hours.
  const timeTicks = (low, high, count) => {
    const unit = high * 3600 < 90 ? 3600 : high < 1.5 ? 60 : 1;
    return ticks(low * unit, high * unit, count).map((value) => value / unit);
  };

  const xOf = (curve) => curve[state.axis === "hours" ? 1 : 0];
  const shownSeries = (tag) =>
    data.series.filter((one) => one.figures[tag] && !state.hidden.has(one.group));
  const shownBands = (tag) =>
    tag !== data.figures[0].tag ? []
      : data.bands.filter((one) => one[state.axis] && !state.hidden.has(one.group));

  // What a curve is at a place: on the line between its neighbours; null where it has not been.
  const valueAt = (xs, ys, x) => {
    let low = 0;
    let high = xs.length - 1;
    if (high < 0 || x < xs[0] || x > xs[high]) return null;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    const width = xs[high] - xs[low];
    return width > 0 ? ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / width : ys[high];
  };

  const extent = (arrays) => {
    let low = Infinity;
    let high = -Infinity;
    for (const values of arrays) {
      for (const value of values) {
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    return [low, high];
  };

  const path = (xs, ys, sx, sy) =>
    xs.map((x, i) => `${i ? "L" : "M"}${sx(x).toFixed(1)} ${sy(ys[i]).toFixed(1)}`).join("");

  const drawFrame = (chart) => {
    const { svg, width, height, sx, sy, x, y } = chart;
    const frame = make("g", { class: "frame" }, svg);
    const levels = ticks(y[0], y[1], height > 200 ? 6 : 4);
    const words = labels(levels);
    levels.forEach((value, i) => {
      make("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: sy(value), y2: sy(value) }, frame);
      text(frame, MARGIN.left - 6, sy(value) + 4, words[i], "end");
    });
    const places = (state.axis === "hours" ? timeTicks : ticks)(x[0], x[1], Math.max(2, width / 110));
    for (const value of places) text(frame, sx(value), height - 6, place(value), "middle");
  };

  const drawBands = (chart, banded) => {
    for (const one of shownBands(chart.tag)) {
      const band = one[state.axis];
      const back = [...band.x].reverse();
      const edge = path(band.x, band.high, chart.sx, chart.sy) +
        path(back, [...band.low].reverse(), chart.sx, chart.sy).replace("M", "L");
      make("path", { class: `band c${one.colour}`, d: `${edge}Z` }, chart.svg);
      make("path", { class: `line c${one.colour}`, d: path(band.x, band.middle, chart.sx, chart.sy) }, chart.svg);
      banded.add(one.group);
    }
  };

  const draw = (chart) => {
    const series = shownSeries(chart.tag);
    const width = Math.max(160, chart.box.clientWidth);
    const height = chart.large ? 320 : 150;
    const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title });
    chart.box.replaceChildren(svg, chart.tip);
    chart.tip.hidden = true;
    Object.assign(chart, { svg, width, height });
    if (!series.length) {
      text(svg, width / 2, height / 2, "no curve is shown", "middle");
      chart.sx = null;
      return;
    }
    const x = extent(series.map((one) => xOf(one.figures[chart.tag])));
    const y = extent(series.map((one) => one.figures[chart.tag][2]));
    if (x[0] === x[1]) x[1] = x[0] + 1;
    const pad = (y[1] - y[0]) * 0.05 || Math.abs(y[0]) * 0.05 || 1;
    chart.x = x;
    chart.y = [y[0] - pad, y[1] + pad];
    const scale = (from, start, end) => (value) => start + ((value - from[0]) / (from[1] - from[0])) * (end - start);
    chart.sx = scale(chart.x, MARGIN.left, width - MARGIN.right);
    chart.sy = scale(chart.y, height - MARGIN.bottom, MARGIN.top);
    drawFrame(chart);
    const banded = new Set();
    drawBands(chart, banded);
    for (const one of series) {
      const curve = one.figures[chart.tag];
      const thin = banded.has(one.group) ? " thin" : "";
      make("path", { class: `line c${one.colour}${thin}`, d: path(xOf(curve), curve[2], chart.sx, chart.sy) }, svg);
    }
    chart.cursor = make("g", { class: "cursor" }, svg);
  };

  const row = (one, value) => {
    const line = document.createElement("div");
    const dot = document.createElement("span");
    dot.className = `dot c${one.colour}`;
    const name = document.createElement("span");
    name.className = "name";
    name.textContent = one.name;
    const number = document.createElement("b");
    number.textContent = short(value);
    line.append(dot, name, number);
    return line;
  };

  const hover = (chart, event) => {
    if (!chart.sx) return;
    const left = chart.svg.getBoundingClientRect().left;
    const inside = (event.clientX - left - MARGIN.left) / (chart.width - MARGIN.left - MARGIN.right);
    const x = chart.x[0] + Math.min(1, Math.max(0, inside)) * (chart.x[1] - chart.x[0]);
    const found = [];
    for (const one of shownSeries(chart.tag)) {
      const curve = one.figures[chart.tag];
      const value = valueAt(xOf(curve), curve[2], x);
      if (value !== null) found.push([one, value]);
    }
    const at = chart.sx(x);
    chart.cursor.replaceChildren();
    make("line", { x1: at, x2: at, y1: MARGIN.top, y2: chart.height - MARGIN.bottom }, chart.cursor);
    for (const [one, value] of found) {
      make("circle", { class: `c${one.colour}`, cx: at, cy: chart.sy(value), r: 3.5 }, chart.cursor);
    }
    found.sort((a, b) => b[1] - a[1]);
    const head = document.createElement("div");
    head.className = "head";
    head.textContent = state.axis === "hours" ? `after ${place(x)}` : `at ${place(x)} env steps`;
    chart.tip.replaceChildren(head, ...found.slice(0, 12).map(([one, value]) => row(one, value)));
    chart.tip.hidden = false;
    const room = chart.width - chart.tip.offsetWidth;
    const beside = at + 14 > room ? at - 14 - chart.tip.offsetWidth : at + 14;
    chart.tip.style.left = `${Math.max(0, Math.min(room, beside))}px`;
  };

  const leave = (chart) => {
    chart.tip.hidden = true;
    if (chart.cursor) chart.cursor.replaceChildren();
  };

  const redraw = () => charts.forEach(draw);

  for (const box of document.querySelectorAll(".chart")) {
    const tip = document.createElement("div");
    tip.className = "tip";
    const chart = { box, tip, tag: box.dataset.tag, title: box.dataset.title, large: box.classList.contains("large") };
    charts.push(chart);
    box.addEventListener("pointermove", (event) => hover(chart, event));
    box.addEventListener("pointerleave", () => leave(chart));
  }
  for (const button of document.querySelectorAll("[data-axis]")) {
    button.addEventListener("click", () => {
      state.axis = button.dataset.axis;
      for (const one of document.querySelectorAll("[data-axis]")) {
        one.setAttribute("aria-pressed", String(one.dataset.axis === state.axis));
      }
      redraw();
    });
  }
  for (const button of document.querySelectorAll("[data-group]")) {
    button.addEventListener("click", () => {
      const group = Number(button.dataset.group);
      if (!state.hidden.delete(group)) state.hidden.add(group);
      button.setAttribute("aria-pressed", String(!state.hidden.has(group)));
      redraw();
    });
  }
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth !== width) {
      width = document.body.clientWidth;
      redraw();
    }
  }).observe(document.body);
})();
