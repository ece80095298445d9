// The mask explorer of the site: draws who sees whom for a few settings. Plain JavaScript, no network.
(function () {
  "use strict";

  const CONTROLS = [
    ["kind", "mask", ["causal", "window", "key", "lists"]],
    ["n", "tokens", [8, 64]],
    ["window", "selected keys", [0, 24]],
    ["local", "local keys", [0, 24]],
    ["sinks", "sink keys", [0, 8]],
    ["documents", "documents", [1, 4]],
    ["seed", "random scores", [1, 99]],
  ];
  const NAMES = { causal: "causal", window: "local keys and sinks", key: "selected by a score per key", lists: "lists of each query" };
  const DEFAULTS = { kind: "key", n: 40, window: 6, local: 4, sinks: 2, documents: 1, seed: 1, query: -1 };
  const TILE = 8;
  const COLORS = { sink: "#4d9a6a", local: "#2f6fb0", chosen: "#e08e45" };

  // Random numbers that the tests make again in Python.
  function randomNumbers(seed, count) {
    let x = seed >>> 0;
    return Array.from({ length: count }, () => {
      x = (Math.imul(1664525, x) + 1013904223) >>> 0;
      return x / 4294967296;
    });
  }

  // The first key of each query's document; documents are equally long, but for the last.
  function documentStarts(n, documents) {
    const size = Math.ceil(n / documents);
    return Array.from({ length: n }, (_, p) => Math.floor(p / size) * size);
  }

  // For each query the keys that it sees: {key: "sink", "local" or "chosen"}.
  function visibleKeys(s) {
    const starts = documentStarts(s.n, s.documents);
    const scores = randomNumbers(s.seed, s.kind === "lists" ? s.n * s.n : s.n);
    return starts.map((start, p) => {
      const seen = new Map(), candidates = [];
      const firstSinks = s.kind === "lists" ? 0 : start; // lists count sinks from the first key of all
      for (let j = start; j <= p; ++j) {
        if (s.kind === "causal") seen.set(j, "chosen");
        else if (j < firstSinks + s.sinks) seen.set(j, "sink");
        else if (p - j < s.local) seen.set(j, "local");
        else candidates.push(j);
      }
      if (s.kind === "key" || s.kind === "lists") {
        const score = (j) => scores[s.kind === "lists" ? p * s.n + j : j];
        candidates.sort((a, b) => score(b) - score(a) || b - a);
        candidates.slice(0, s.window).forEach((j) => seen.set(j, "chosen"));
      }
      return seen;
    });
  }

  // What the numbers below the picture say.
  function counts(s, rows) {
    let visible = 0, computed = 0, tiles = 0;
    rows.forEach((seen) => (visible += seen.size));
    for (let top = 0; top < s.n; top += TILE) {
      const tile = rows.slice(top, top + TILE), live = new Set();
      tile.forEach((seen) => seen.forEach((_, j) => live.add(j)));
      computed += live.size * tile.length;
      const columns = new Set([...live].map((j) => Math.floor(j / TILE)));
      columns.forEach((column) => (tiles += Math.min(TILE, s.n - column * TILE) * tile.length));
    }
    const size = Math.ceil(s.n / s.documents), last = s.query < 0 ? s.n - 1 : Math.min(s.query, s.n - 1);
    const cache = s.kind === "lists" ? last - Math.floor(last / size) * size + 1 : rows[last].size;
    return { visible, computed, tiles, dense: (s.n * (s.n + 1)) / 2, cache, query: last };
  }

  function settingsOf(text) {
    const s = { ...DEFAULTS };
    for (const [name, value] of new URLSearchParams(text.replace(/^#/, ""))) {
      if (!(name in s)) continue;
      s[name] = name === "kind" ? (value in NAMES ? value : s.kind) : Math.trunc(Number(value)) || 0;
    }
    for (const [name, , range] of CONTROLS) if (name !== "kind") s[name] = Math.min(Math.max(s[name], range[0]), range[1]);
    return s;
  }

  function element(parent, tag, attributes, text) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    parent.appendChild(made);
    return made;
  }

  function draw(canvas, s, rows, marked) {
    const width = Math.min(canvas.parentNode.clientWidth || 480, 560), ratio = window.devicePixelRatio || 1;
    canvas.width = canvas.height = width * ratio;
    canvas.style.width = canvas.style.height = width + "px";
    const context = canvas.getContext("2d"), cell = (width * ratio) / s.n, gap = Math.max(1, cell * 0.08);
    const ink = getComputedStyle(canvas).color;
    context.clearRect(0, 0, canvas.width, canvas.height);
    rows.forEach((seen, p) => {
      for (let j = 0; j < s.n; ++j) {
        context.globalAlpha = seen.has(j) ? (marked < 0 || marked === p ? 1 : 0.55) : 0.07;
        context.fillStyle = seen.has(j) ? COLORS[seen.get(j)] : ink;
        context.fillRect(j * cell + gap / 2, p * cell + gap / 2, cell - gap, cell - gap);
      }
    });
    context.globalAlpha = 1;
    if (marked >= 0) {
      context.strokeStyle = ink;
      context.lineWidth = 1.5 * ratio;
      context.strokeRect(0, marked * cell, canvas.width, cell);
    }
  }

  function start(root) {
    let s = settingsOf(window.location.hash);
    const form = element(root, "form", { class: "explorer-controls" });
    const inputs = {};
    for (const [name, label, range] of CONTROLS) {
      const holder = element(form, "label", {}, label + " ");
      if (name === "kind") {
        inputs[name] = element(holder, "select", { name });
        for (const kind of range) element(inputs[name], "option", { value: kind }, NAMES[kind]);
      } else {
        inputs[name] = element(holder, "input", { name, type: "range", min: range[0], max: range[1] });
        element(holder, "output", {});
      }
    }
    const box = element(root, "div", { class: "explorer-picture" });
    const canvas = element(box, "canvas", {
      role: "slider", tabindex: 0, "aria-orientation": "vertical", "aria-valuemin": 0,
      "aria-label": "query; rows are queries, columns keys, coloured where a query sees a key",
    });
    const legend = element(root, "p", { class: "explorer-legend" });
    for (const [kind, words] of [["sink", "sink"], ["local", "local"], ["chosen", "selected, listed or causal"]]) {
      element(legend, "span", { style: "background:" + COLORS[kind] });
      element(legend, "em", {}, words);
    }
    const summary = element(root, "p", { class: "explorer-summary", "aria-live": "polite" });
    const data = element(root, "pre", { id: "mask-explorer-data", hidden: "" });

    let shown = -1;
    function show(marked) {
      shown = marked;
      const rows = visibleKeys(s), found = counts({ ...s, query: marked }, rows);
      for (const [name] of CONTROLS) {
        inputs[name].value = s[name];
        if (inputs[name].nextSibling) inputs[name].nextSibling.textContent = " " + s[name];
      }
      const selects = s.kind === "key" || s.kind === "lists";
      for (const [name, used] of [["window", selects], ["seed", selects], ["local", s.kind !== "causal"], ["sinks", s.kind !== "causal"]]) {
        inputs[name].disabled = !used;
      }
      draw(canvas, s, rows, marked);
      const share = (count) => count.toLocaleString("en") + " (" + Math.round((100 * count) / found.dense) + " %)";
      const keys = [...rows[found.query].keys()].sort((a, b) => a - b);
      summary.textContent =
        `Visible pairs: ${share(found.visible)}. Computed in tiles of ${TILE} queries: ${share(found.computed)} with gathered keys, ` +
        `${share(found.tiles)} by skipping whole tiles. Dense causal: ${found.dense.toLocaleString("en")}. ` +
        `Query ${found.query} sees ${keys.length} keys: ${keys.join(", ")}. A cache then holds ${found.cache} keys.`;
      canvas.setAttribute("aria-valuemax", s.n - 1);
      canvas.setAttribute("aria-valuenow", found.query);
      canvas.setAttribute("aria-valuetext", `query ${found.query} sees ${keys.length} keys`);
      const bits = rows.map((seen) => Array.from({ length: s.n }, (_, j) => (seen.has(j) ? "1" : "0")).join(""));
      data.textContent = JSON.stringify({ ...found, bits });
    }

    form.addEventListener("input", () => {
      for (const [name] of CONTROLS) s[name] = name === "kind" ? inputs[name].value : Number(inputs[name].value);
      const given = CONTROLS.map(([name]) => name + "=" + s[name]).join("&");
      window.history.replaceState(null, "", "#" + given);
      show(-1);
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    // A mouse marks the query below it, a finger the one that it taps or drags to, the arrow keys the next one.
    const mark = (query) => show(Math.min(Math.max(query, 0), s.n - 1));
    const point = (event) => mark(Math.floor(((event.clientY - canvas.getBoundingClientRect().top) / canvas.clientHeight) * s.n));
    canvas.addEventListener("pointerdown", point);
    canvas.addEventListener("pointermove", point);
    canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && show(-1));
    canvas.addEventListener("keydown", (event) => {
      const from = shown < 0 ? s.n - 1 : shown;
      const moved = { ArrowUp: from - 1, ArrowDown: from + 1, PageUp: from - TILE, PageDown: from + TILE, Home: 0, End: s.n - 1 }[event.key];
      if (moved !== undefined) mark(moved), event.preventDefault();
      else if (event.key === "Escape") show(-1);
    });
    window.addEventListener("hashchange", () => {
      if (window.location.hash.includes("=")) show((s = settingsOf(window.location.hash)).query); // else a heading of the page
    });
    window.addEventListener("resize", () => show(shown));
    show(s.query);
  }

  const root = document.getElementById("mask-explorer");
  if (root) start(root);
})();
