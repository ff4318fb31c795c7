// Each function shows one section of the page from the status. `before` is the status of an earlier poll, or null.
import { bar, bytes, count, h, lasted, note, percent, plural, rate, seconds, table, usageChart } from "./draw.js";

const INTERVAL_SECONDS = 10;
const SPANS = [600, 3600];
const SHOWN_REQUESTS = 20;
const SMALL_POOL = 512 * 1024 ** 2;
const show = (id, ...children) => document.getElementById(id).replaceChildren(...children.filter(Boolean));
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const median = (numbers) => [...numbers].sort((a, b) => a - b)[Math.floor(numbers.length / 2)];

export function summary({ kv_cache, requests, uptime_seconds }) {
  const tokens = requests.recent.map((one) => one.decode_seconds_per_token).filter((time) => time !== null);
  const known = (number) => (requests.statistics ? count(number) : "–");
  const tiles = [
    ["KV cache in use", kv_cache.used_fraction === null ? "–" : percent(kv_cache.used_fraction)],
    ["Time per token", tokens.length ? seconds(median(tokens)) : "–"],
    ["Running", known(requests.running)],
    ["Waiting", known(requests.waiting)],
    ["Up for", lasted(uptime_seconds)],
  ];
  show("summary", ...tiles.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

export function layers({ workers }) {
  if (!workers.length) return show("layers", note("The workers have not reported yet."));
  const alike = workers.every((worker) => same(worker.layers, workers[0].layers));
  const shown = alike ? workers.slice(0, 1) : workers;
  const parts = shown.flatMap((worker) => [
    workers.length > 1 ? h("h3", {}, alike ? `All ${workers.length} ranks` : `Rank ${worker.rank} on ${worker.host}`) : null,
    strip(worker),
    legend(worker),
  ]);
  const cpu = workers.some((worker) => worker.device_bytes === null);
  const host = workers.some((worker) => worker.host_layers);
  show("layers", ...parts, cpu && host
    ? note("This server computes on CPUs, so both caches are in main memory. “Device” is vLLM’s own cache, “host” the separate pool.")
    : null);
}

function strip(worker) {
  const cells = worker.layers.flatMap(({ place, kernels, layers }) => layers.map((number) => ({ place, kernels, number })));
  cells.sort((a, b) => a.number - b.number);
  return h("ol", { class: "layers" }, ...cells.map(({ place, kernels, number }) => {
    const text = `Layer ${number}: KV cache on the ${place}, ${kernels}`;
    return h("li", { class: place, title: text, "aria-label": text }, String(number));
  }));
}

function legend({ layers, host_layers, device, device_bytes }) {
  return h("div", { class: "legend" }, ...layers.map(({ place, kernels, layers: numbers }) => {
    const onHost = place === "host";
    const where = onHost ? `Host memory, ${bytes(host_layers.pool_bytes)}` : device_bytes === null ? "Device (CPU)" : device;
    const kernel = !onHost ? kernels : device_bytes === null ? `Attention on the CPU (${kernels})`
      : `Decoding: attention on the CPU. Prompts: copied to the device (${kernels}).`;
    return h("div", {}, h("i", { class: place, "aria-hidden": "true" }),
      h("span", {}, h("strong", {}, plural(numbers.length, "layer")), ` · ${where}`), h("p", { class: "quiet" }, kernel));
  }));
}

export function pool({ kv_cache, requests, workers, uptime_seconds }) {
  if (!requests.statistics)
    return show("pool", note(`There are no statistics of vLLM’s: ${requests.why_no_statistics}. So the use of the KV cache is not known.`));
  const used = kv_cache.used_fraction ?? 0;
  const size = workers.reduce((sum, { host_layers }) => sum + (host_layers ? host_layers.pool_bytes : 0), 0);
  const span = SPANS.find((seconds) => uptime_seconds <= seconds) ?? SPANS[SPANS.length - 1];
  const points = kv_cache.history.map(({ seconds_ago, highest, last }) => [seconds_ago, highest, last]);
  const peak = Math.max(0, ...points.map(([, highest]) => highest));
  const label = `KV cache in use over the last ${lasted(span)}: now ${percent(used)}, highest ${percent(peak)}`;
  show("pool",
    h("p", { class: "figure" }, percent(used), h("small", {}, ` of the blocks, at most ${percent(peak)} in the last hour`)),
    h("div", { class: "chart" }, usageChart(points, span, INTERVAL_SECONDS, label)),
    size ? note(`Host pool: ${bytes(used * size)} of ${bytes(size)} in use${workers.length > 1 ? ", all ranks together" : ""}. Device layers use the same fraction.`) : null);
}

export function rates({ workers }, before, elapsed) {
  const found = workers.filter((worker) => worker.host_layers);
  if (!found.length)
    return show("rates", note("This server has no host layers. So no KV is copied from host memory to the device, and the CPU computes no attention for the device."));
  show("rates", ...found.flatMap((worker) => {
    const old = before?.workers.find(({ rank }) => rank === worker.rank)?.host_layers;
    return [found.length > 1 ? h("h3", {}, `Rank ${worker.rank}`) : null, ...ofWorker(worker, old, elapsed)];
  }), note("“Since start” counts only the time in which the CPU computes attention. Limits were measured when the server started."),
  found.some(({ host_layers }) => host_layers.pool_bytes < SMALL_POOL)
    ? note("This pool is so small that the CPU’s caches hold much of it. The rate of plain reads is then higher than that of main memory.")
    : null);
}

function ofWorker({ host_layers: now, device_bytes }, old, elapsed) {
  const busy = old ? now.cpu_attention_seconds - old.cpu_attention_seconds : 0;
  const mean = now.cpu_attention_seconds ? now.cpu_attention_bytes / now.cpu_attention_seconds : 0;
  const recent = busy > 0 ? (now.cpu_attention_bytes - old.cpu_attention_bytes) / busy : 0;
  const streamed = (stats) => stats.decode_streamed_bytes + stats.prefill_streamed_bytes;
  const bars = [
    limited("CPU attention, since start", mean, now.plain_read_rate, "plain reads"),
    limited("CPU attention, now", recent, now.plain_read_rate, "plain reads"),
  ];
  if (device_bytes !== null) {
    const copied = old && elapsed > 0 ? (streamed(now) - streamed(old)) / elapsed : 0;
    bars.push(limited("Copies to the device, now", copied, now.rates?.link, "the link"));
    const waited = old && elapsed > 0 ? Math.min(1, (now.device_wait_seconds - old.device_wait_seconds) / elapsed) : 0;
    bars.push(bar("Device waits for the CPU, now", waited, 1, percent(waited), "of the time (upper limit)"));
  }
  return bars;
}

function limited(name, value, limit, of) {
  const text = value ? rate(value) : "idle";
  if (!limit) return bar(name, value, null, text, "limit not measured");
  return bar(name, value, limit, text, value ? `${percent(value / limit)} of ${rate(limit)} (${of})` : `limit ${rate(limit)} (${of})`);
}

export function plan({ prediction: found, requests, workers, max_model_len }) {
  if (found.why_not)
    return show("plan", h("p", {}, "No prediction: ", found.why_not, "."),
      note("Measured times are in the table of requests below."));
  const compare = (measured, predicted) => requests.recent.filter((one) => one[measured] && one[predicted]);
  const row = (name, measured, predicted) => {
    const both = compare(measured, predicted);
    if (!both.length) return [name, "–", "–", "no request to compare yet"];
    const ratio = median(both.map((one) => one[measured] / one[predicted]));
    return [name, seconds(median(both.map((one) => one[predicted]))), seconds(median(both.map((one) => one[measured]))),
      `${ratio.toFixed(2)} × the prediction, median of ${plural(both.length, "request")}`];
  };
  const actual = workers[0].layers.filter(({ place }) => place === "host").reduce((sum, { layers }) => sum + layers.length, 0);
  show("plan",
    table([["", "title"], ["Planned", "number"], ["Measured", "number"], ["", "title"]], [
      ["Host layers", count(found.planned_host_layers), count(actual), `planned for ${count(max_model_len)} tokens`],
      row("Prompt, up to the first token", "prefill_seconds", "predicted_prefill_seconds"),
      row("Each further token", "decode_seconds_per_token", "predicted_decode_seconds_per_token"),
    ], "Plan and measurement"),
    note(`At ${count(found.decode_tokens)} tokens, the plan expects ${seconds(found.prefill_seconds)} for the prompt (limited by ${found.prefill_limited_by}) and ${seconds(found.decode_seconds_per_token)} per token (limited by ${found.decode_limited_by}).`),
    note(`The prediction is for ${found.device} in ${found.host}, with ${found.measured_rates ? "the rates that this server measured" : "the rates from the planner’s tables"}. It assumes that each request runs alone. Requests that run together take longer.`));
}

export function tiling({ workers }) {
  const found = workers.filter((worker) => worker.tiling);
  document.getElementById("tiling-card").hidden = !found.length;
  if (!found.length) return;
  const { layers: number, cuts, trials } = found[0].tiling;
  const hidden = trials.filter((trial) => trial.blocks.length > 1);
  show("tiling",
    h("p", {}, h("strong", {}, plural(number, "layer")), ` overlap their all-reduce with their matmul (${cuts}).`),
    hidden.length ? table([["Tokens", "number"], ["Weight", "number"], ["Blocks", "number"], ["Collective", ""], ["Saved per layer", "number"]],
      hidden.map((trial) => [count(trial.tokens), `${count(trial.inputs_per_rank)} × ${count(trial.outputs)}`, count(trial.blocks.length), trial.collective, seconds(trial.saved_seconds)]),
      "Calibration") : null);
}

export function requests({ requests: { recent, statistics, why_no_statistics } }) {
  if (!recent.length) return show("requests", note("No request since the server started."));
  const number = (value) => (value === null ? "–" : count(value));
  const time = (value) => (value === null ? "–" : seconds(value));
  const cached = (one) => (one.cached_tokens ? `${number(one.prompt_tokens)} (${number(one.cached_tokens)} cached)` : number(one.prompt_tokens));
  show("requests",
    table([["Request", "title"], ["Arrived", "number"], ["Prompt tokens", "number"], ["New tokens", "number"], ["Prefill", "number"], ["Per token", "number"], ["Duration", "number"], ["Status", "aside"]],
      recent.slice(0, SHOWN_REQUESTS).map((one) => [
        h("span", { class: "id", title: `${one.path} ${one.response_id ?? ""}` }, one.response_id ?? one.path),
        `${lasted(one.seconds_ago)} ago`, cached(one), number(one.new_tokens), time(one.prefill_seconds),
        time(one.decode_seconds_per_token), time(one.seconds), status(one),
      ]), "Recent requests", "requests"),
    statistics ? null : note(`There are no statistics of vLLM’s: ${why_no_statistics}. So times within a request are not known.`));
}

function status({ status: code, complete, seconds: ended }) {
  if (ended === null) return h("span", { class: "quiet" }, "running");
  if (code === null) return h("span", { class: "bad" }, "no answer");
  if (code >= 400) return h("span", { class: "bad" }, `error ${code}`);
  return complete ? h("span", { class: "good" }, `done ${code}`) : h("span", { class: "bad" }, "cut off");
}
