// Asks the routes beside this page and shows what they answer. Text of the server is only ever set as text.
const REFRESH = 2000, HISTORY = 120, KEY = "antkv-api-key";
const $ = (id) => document.getElementById(id);
const history = [];
let last = null, shown = null, config = null, span = 0;

class Refused extends Error {}

async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, { headers, cache: "no-store" });
  if (response.status === 401) throw new Refused();
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  return response.json();
}

function element(name, text = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function drawing(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function count(number) {
  return Math.round(number).toLocaleString("en");
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${bytes.toFixed(unit && bytes < 100 ? 1 : 0)} ${units[unit]}`;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

function say(sentence, isError = false) {
  if ($("state").textContent !== sentence) $("state").textContent = sentence;
  $("state").className = isError ? "error" : "";
}

// One labelled bar: parts are [class, name, value, text], and `whole` fills the track.
function bar(parts, whole) {
  const label = element("div", "", { class: "bar-label" }), track = element("div", "", { class: "track" });
  for (const [kind, name, value, text] of parts) {
    const entry = element("span");
    entry.append(element("span", "", { class: `key ${kind}` }), `${name} ${text}`);
    label.append(entry);
    const filled = element("i", "", { class: kind });
    filled.style.width = `${whole ? (100 * value) / whole : 0}%`;
    track.append(filled);
  }
  const made = element("div");
  made.append(label, track);
  return made;
}

function rows(table, entries) {
  const body = element("tbody");
  for (const [head, ...cells] of entries) {
    const row = element("tr");
    row.append(element("th", head, { scope: "row" }), ...cells.map((cell) => element("td", String(cell))));
    body.append(row);
  }
  table.querySelector("tbody")?.remove();
  table.append(body);
}

function heads(table, names) {
  const head = element("thead"), row = element("tr");
  row.append(...names.map((name) => element("th", name, { scope: "col" })));
  head.append(row);
  table.replaceChildren(head);
}

function showUse(status) {
  const pages = (kind) => sum(status.engines.map((engine) => engine.pages_in_use[kind] ?? 0));
  const vq = pages("vq") * status.pool_page_bytes, recency = pages("recency") * status.pool_page_bytes;
  const taken = vq + recency + pages("state") * status.pool_page_bytes;
  const tokens = sum(status.engines.map((engine) => engine.tokens_in_use));
  const bf16 = tokens * status.bf16_bytes_per_token;
  $("bytes").textContent = size(taken);
  $("ratio").textContent = tokens ? `${percent(taken / bf16)} of the ${size(bf16)} that BF16 would take` : "no request is running";
  const whole = Math.max(taken, bf16);
  $("use-bars").replaceChildren(
    bar([["vq", "codes, anchors", vq, size(vq)], ["recency", "recent rows", recency, size(recency)]], whole),
    bar([["bf16", "BF16 would take", bf16, size(bf16)]], whole),
  );
  $("tokens").textContent = count(tokens);
  $("pool").textContent = percent((pages("vq") + pages("recency") + pages("state")) / sum(status.engines.map((engine) => engine.pool_pages)));
}

function showRate(status) {
  const stored = sum(status.engines.map((engine) => engine.tokens_stored)), now = performance.now();
  $("total").textContent = count(stored);
  if (last && stored >= last.stored) {
    history.push((1000 * (stored - last.stored)) / (now - last.now));
    if (history.length > HISTORY) history.shift();
    const rate = history.at(-1), peak = Math.max(...history, 1e-9);
    $("rate").textContent = rate && rate < 10 ? rate.toFixed(1) : count(rate);
    const points = history.map((value, index) => `${(120 * index) / Math.max(1, history.length - 1)} ${(38 - (36 * value) / peak).toFixed(2)}`);
    $("spark").firstElementChild.setAttribute("d", `M${points.join("L")}`);
    $("spark").setAttribute("aria-label", `Now ${count(rate)}, at most ${count(peak)} tokens per second`);
  }
  last = { stored, now };
}

function showAttention(status) {
  const part = (kind) => sum(status.engines.map((engine) => engine.sampled_attention[kind]));
  const [recent, anchors, codes] = ["recent", "anchors", "codes"].map(part), all = recent + anchors + codes;
  $("samples").textContent = count(all);
  if (!all) return;
  $("exact").textContent = percent((recent + anchors) / all);
  $("attention-bars").replaceChildren(
    bar([["recent", "recent", recent, percent(recent / all)], ["anchors", "anchors", anchors, percent(anchors / all)],
      ["codes", "codes", codes, percent(codes / all)]], all),
  );
}

function showSetup(status) {
  const { bits, engines } = status, first = engines[0];
  const thousand = (name) => (1000 * sum(engines.map((e) => e[name]))) / Math.max(1, sum(engines.map((e) => e.tokens_stored)));
  rows($("setup"), [
    ["Preset", status.preset],
    ["Bits per element", `${bits.effective.toFixed(3)} at ${count(bits.at_tokens)} tokens`],
    ...Object.entries(bits.parts).map(([part, value]) => [part, value.toFixed(3)]),
    ["Anchors per 1,000 tokens", thousand("anchors_chosen").toFixed(1)],
    ["Sinks per 1,000 tokens", thousand("sinks_found").toFixed(1)],
    ["Codebook", status.codebook.identity],
    ...Object.entries(status.versions),
  ]);
  $("setup").querySelectorAll("th").forEach((head) => head.classList.toggle("part", head.textContent in bits.parts));
  for (const name of ["settings", "engine"]) rows($(name), Object.entries(config[name]).map(([key, value]) => [key, value ?? "–"]));
  const stores = engines.flatMap((engine) => engine.store ?? []), of = (name) => sum(stores.map((store) => store[name]));
  $("store").hidden = !stores.length;
  if (stores.length) rows($("store"), [
    ["Bytes", size(stores[0].num_bytes) + (stores[0].max_bytes ? ` of ${size(stores[0].max_bytes)}` : "")],
    ["Hits", `${count(of("hits"))} of ${count(of("lookups"))} requests`],
    ["Tokens of hits", count(of("hit_tokens"))],
    ["Time saved", `about ${count(of("seconds_saved"))} s`],
    ["Files removed", count(stores[0].evictions)],
  ]);
  rows($("operations"), [
    ["kernels", first.implementation],
    ...(first.fallbacks === null ? [] : [["fall-backs", sum(engines.map((engine) => engine.fallbacks))]]),
    ...Object.keys(first.operations).map((name) => {
      const [calls, seconds] = ["calls", "seconds"].map((key) => sum(engines.map((engine) => engine.operations[name][key])));
      return [name, `${count(calls)} calls, ${seconds.toFixed(1)} s`];
    }),
  ]);
}

function showPrompts(answer) {
  const choices = answer.prompts.map(({ engine, prompt, tokens, running }) => element("option",
    `${prompt}${last.engines > 1 ? ` of engine ${engine}` : ""}: ${count(tokens)} tokens${running ? ", running" : ""}`,
    { value: `engine=${engine}&prompt=${prompt}` }));
  $("prompt").replaceChildren(...choices);
  $("prompt").disabled = !choices.length;
  const map = answer.map;
  if (map) $("prompt").value = `engine=${map.engine}&prompt=${map.prompt}`;
}

// How many heads keep each token of the window.
function votes(map, layers) {
  const found = new Array(map.tokens).fill(0);
  for (const position of layers.flat(2)) found[position - map.first_token]++;
  return found;
}

const word = (map, position) => map.text?.[position - map.first_token] ?? "";

function showMap() {
  const map = shown;
  $("map").hidden = $("map-tokens").hidden = $("map-table").hidden = !map;
  $("map-text").hidden = !map?.text;
  $("earlier").disabled = $("later").disabled = true;
  if (!map) {
    $("map-summary").textContent = "There is no prompt to show: it needs a full block of 128 tokens, and the prefix cache once it has ended.";
    return;
  }
  const kind = document.querySelector("input[name=kind]:checked").value, layers = map[kind];
  const numHeads = layers[0].length, numRows = layers.length * numHeads, end = map.first_token + map.tokens;
  const kept = votes(map, layers), total = sum(kept);
  $("earlier").disabled = !map.first_token;
  $("later").disabled = end >= map.available;
  $("map-summary").textContent = `Prompt ${map.prompt}, tokens ${count(map.first_token)} to ${count(end - 1)} of ${count(map.available)}: `
    + `${count(total)} ${kind.toUpperCase()} anchors in ${layers.length} layers of ${numHeads} KV heads, ${percent(total / (numRows * map.tokens))} of the rows.`;
  draw(map, layers, numHeads, numRows);
  showTokens(map, kept, numRows);
  showTable(map, layers);
  showText(map, kept);
}

function draw(map, layers, numHeads, numRows) {
  const svg = $("map-svg"), width = Math.max(1, map.tokens / 400);
  svg.setAttribute("viewBox", `0 0 ${map.tokens} ${numRows}`);
  svg.style.height = `${Math.min(640, Math.max(160, 14 * numRows))}px`;
  const made = [];
  layers.forEach((_, layer) => {
    if (layer % 2) made.push(drawing("rect", { class: "band", x: 0, y: layer * numHeads, width: map.tokens, height: numHeads }));
  });
  for (let x = 128; x < map.tokens; x += 128) made.push(drawing("path", { class: "block", d: `M${x} 0V${numRows}` }));
  layers.forEach((heads, layer) => heads.forEach((positions, head) => made.push(drawing("path", { class: "marks",
    d: positions.map((position) => `M${position - map.first_token} ${layer * numHeads + head + 0.1}h${width}v.8h-${width}z`).join("") }))));
  svg.replaceChildren(...made);
  const every = Math.ceil(layers.length / 24);
  $("map-layers").replaceChildren(...layers.map((_, layer) => element("span", layer % every ? "" : layer ? layer : "layer 0")));
  $("map-axis").replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map((share) => element("span", `${share ? "" : "token "}${count(map.first_token + share * map.tokens)}`)));
}

function showTokens(map, kept, numRows) {
  const best = [...kept.keys()].filter((index) => kept[index]).sort((a, b) => kept[b] - kept[a] || a - b).slice(0, 20);
  const table = $("map-tokens").querySelector("table");
  heads(table, ["Token", "Heads that keep it", ...(map.text ? ["Text"] : [])]);
  rows(table, best.map((index) => [map.first_token + index, `${kept[index]} of ${numRows}`,
    ...(map.text ? [word(map, map.first_token + index)] : [])]));
}

function showTable(map, layers) {
  const table = $("map-table").querySelector("table");
  heads(table, ["Layer", "KV head", "Tokens"]);
  if ($("map-table").open) rows(table, layers.flatMap((heads, layer) => heads.map((positions, head) => [layer, head, positions.join(", ")])));
}

function showText(map, kept) {
  $("text").replaceChildren(...(map.text ?? []).map((text, index) => kept[index]
    ? element("mark", text, { title: `token ${map.first_token + index}: ${kept[index]} heads` }) : text));
}

async function lookAgain(block = 0, choice = "") {
  const answer = await ask(`anchors?block=${block}${choice && `&${choice}`}`);
  shown = answer.map;
  span = Math.max(span, shown?.tokens ?? 0);
  if (shown) shown.available = answer.prompts.find((p) => p.engine === shown.engine && p.prompt === shown.prompt).tokens;
  showPrompts(answer);
  showMap();
}

async function refresh() {
  try {
    const status = await ask("status");
    $("key-form").hidden = true;
    if (!status.active) return say(`The antkv cache is not active: the server runs with --kv-cache-dtype ${status.kv_cache_dtype}.`);
    const first = !config;
    config ??= await ask("config");
    $("subtitle").textContent = `${config.model}, ${config.kv_cache_dtype}`;
    $("panels").hidden = false;
    showUse(status);
    showRate(status);
    showAttention(status);
    showSetup(status);
    last.engines = status.engines.length;
    if (first || !shown) await lookAgain();
    say("Live");
  } catch (error) {
    failed(error);
  }
}

function failed(error) {
  if (error instanceof Refused) refused();
  else say(`No answer, trying again: ${error.message}.`, true);
}

function refused() {
  const tried = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  say("Waiting for the API key.");
  $("panels").hidden = true;
  if (tried) $("key-error").textContent = "The server refused this API key.";
  if ($("key-form").hidden) {
    $("key-form").hidden = false;
    $("key").focus();
  }
}

async function poll() {
  if (!document.hidden && $("key-form").hidden) await refresh();
  setTimeout(poll, REFRESH);
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = $("key-error").textContent = "";
  refresh();
});
const look = (block) => lookAgain(block, $("prompt").value).catch(failed);
$("prompt").addEventListener("change", () => look(0));
$("earlier").addEventListener("click", () => look(Math.max(0, (shown.first_token - span) / 128)));
$("later").addEventListener("click", () => look((shown.first_token + shown.tokens) / 128));
$("renew").addEventListener("click", () => lookAgain().catch(failed));
document.querySelectorAll("input[name=kind]").forEach((input) => input.addEventListener("change", showMap));
$("map-table").addEventListener("toggle", showMap);
$("map-svg").addEventListener("pointermove", (event) => {
  const box = $("map-svg").getBoundingClientRect(), numHeads = shown.k[0].length;
  const row = Math.min(shown.k.length * numHeads - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * shown.k.length * numHeads)));
  const position = shown.first_token + Math.min(shown.tokens - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * shown.tokens)));
  const text = word(shown, position);
  $("map-pointed").textContent = `Layer ${Math.floor(row / numHeads)}, KV head ${row % numHeads}, token ${count(position)}${text && `: “${text}”`}`;
});
poll();
