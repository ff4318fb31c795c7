// Elements, number formats and the chart. Nothing here knows the status.

export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const unit = count < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(count) / 10));
  return `${digits(count / 1024 ** unit)} ${units[unit]}`;
}

export const rate = (perSecond) => `${digits(perSecond / 1e9)} GB/s`;
export const percent = (fraction) => `${fraction > 0 && fraction < 0.1 ? (100 * fraction).toFixed(1) : Math.round(100 * fraction)} %`;
export const count = (number) => number.toLocaleString("en-US");
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

/** Three significant digits. */
function digits(number) {
  if (number === 0) return "0";
  return number >= 100 ? count(Math.round(number)) : number.toFixed(number >= 10 ? 1 : 2);
}

export function seconds(time) {
  if (time < 0.001) return `${digits(1e6 * time)} µs`;
  return time < 1 ? `${digits(1e3 * time)} ms` : `${digits(time)} s`;
}

/** How long something has lasted, in its two largest units. */
export function lasted(time) {
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = parts.findIndex(([, size]) => time >= size);
  if (first < 0) return "0 s";
  let left = Math.floor(time);
  const texts = parts.slice(first, first + (first < 2 ? 2 : 1)).map(([unit, size]) => {
    const number = Math.floor(left / size);
    left -= number * size;
    return number ? `${number} ${unit}` : "";
  });
  return texts.filter(Boolean).join(" ");
}

/** A step line of fractions over the last `span` seconds. points: [seconds ago, highest, last], the oldest first. */
export function usageChart(points, span, intervalSeconds, label) {
  const [width, height, left, bottom] = [440, 150, 38, 20];
  const x = (ago) => left + (width - left) * (1 - Math.min(ago, span) / span);
  const y = (fraction) => 6 + (height - bottom - 6) * (1 - fraction);
  const line = [];
  points.forEach(([ago, highest, last], index) => {
    const end = Math.max(ago - intervalSeconds, 0);
    const following = index + 1 < points.length ? points[index + 1][0] : 0;
    if (ago > span) return line.splice(0, line.length, [x(span), y(last)]);
    line.push([x(ago), line.length ? line[line.length - 1][1] : y(0)], [x(ago), y(highest)], [x(end), y(highest)]);
    // No step follows at once, so the last fraction stays. A step chart drops to it only there.
    if (end - following > intervalSeconds / 2 || index + 1 === points.length) line.push([x(end), y(last)]);
  });
  if (line.length) line.push([x(0), line[line.length - 1][1]]);
  const path = line.map(([a, b], index) => `${index ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const fraction of [0, 0.5, 1]) {
    picture.append(
      svg("line", { class: "grid", x1: left, x2: width, y1: y(fraction), y2: y(fraction) }),
      svg("text", { x: left - 6, y: y(fraction) + 4, "text-anchor": "end" }, `${100 * fraction} %`),
    );
  }
  for (const [ago, text, anchor] of [[span, `${lasted(span)} ago`, "start"], [span / 2, lasted(span / 2), "middle"], [0, "now", "end"]])
    picture.append(svg("text", { x: x(ago), y: height - 3, "text-anchor": anchor }, text));
  if (line.length) {
    const ground = `L${x(0)} ${y(0)}L${line[0][0].toFixed(1)} ${y(0)}Z`;
    picture.append(svg("path", { class: "area", d: path + ground }), svg("path", { class: "curve", d: path }));
  }
  return picture;
}

/** A bar from 0 to the limit. Without a limit, there is no bar, only a dotted track. */
export function bar(name, value, limit, text, limitText) {
  const part = limit ? Math.min(1, value / limit) : 0;
  const inner = h("div");
  inner.style.width = `${100 * part}%`;
  const track = limit
    ? { class: "track", role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * part) }
    : { class: "track unknown", "aria-hidden": "true" };
  return h("div", { class: "rate" },
    h("p", {}, h("span", {}, name), h("span", {}, h("strong", {}, text), h("span", { class: "quiet" }, ` ${limitText}`))),
    h("div", track, limit ? inner : null));
}

/** columns: [title, class]; rows: arrays of texts or elements. */
export function table(columns, rows, caption, kind = "") {
  const cell = (content, [title, place]) => h("td", { class: place, "data-name": title }, content);
  return h("div", { class: "scroll" },
    h("table", { class: kind, "aria-label": caption },
      h("thead", {}, h("tr", {}, ...columns.map(([title, place]) => h("th", { class: place, scope: "col" }, title)))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((content, index) => cell(content, columns[index])))))));
}

export const note = (text) => h("p", { class: "note" }, text);
