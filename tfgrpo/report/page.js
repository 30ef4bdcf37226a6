"use strict";
// Groups are gzipped JSON in base64 inside inert script elements; texts reach the page as text
// nodes only. Nothing is fetched, except by the live view, which polls its own address.
(() => {
  const byId = (id) => document.getElementById(id);
  const make = (tag, text, name) => {
    const node = document.createElement(tag);
    if (text !== undefined && text !== null) node.textContent = String(text);
    if (name) node.className = name;
    return node;
  };
  const cache = new Map();

  async function chunk(number) {
    if (!cache.has(number)) {
      const packed = byId("groups-" + number).textContent.trim();
      const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      cache.set(number, new Response(stream).json());
    }
    return cache.get(number);
  }

  const state = { index: [], shown: [], page: 0, order: "", down: false };
  const PAGE = matchMedia("(max-width: 40rem)").matches ? 12 : 25;
  const ARMS = { empty: "no library", final: "the library", current: "library so far",
                 proposed: "a proposal" };
  const mean = (g) => {
    const known = g.rewards.filter((r) => r !== null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  };
  const spread = (g) => {
    const known = g.rewards.filter((r) => r !== null);
    return known.length ? Math.max(...known) - Math.min(...known) : null;
  };
  const digits = (x) => x.toFixed(2).replace(/\.00$/, "");
  const KEYS = {
    task: (g) => g.task_id, stage: (g) => g.stage, step: (g) => g.step,
    shown: (g) => ARMS[g.arm] || g.arm, mean, spread,
  };

  function rewardTag(reward, range) {
    if (reward === null) return make("span", "no reward", "tag");
    const isGood = reward >= range[1] - 1e-9 && range[1] > range[0];
    const isBad = reward <= range[0] + 1e-9;
    return make("span", digits(reward), "tag " + (isGood ? "good" : isBad ? "bad" : "accent"));
  }

  function compare(a, b) {
    if (a === null || b === null) return (a === null) - (b === null);
    return typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
  }

  function filter() {
    const stage = byId("stage").value;
    const kind = byId("kind").value;
    const word = byId("find").value.toLowerCase();
    state.shown = state.index.filter((g) =>
      (!stage || g.stage === stage) &&
      (!kind || g.kinds.includes(kind)) &&
      (!word || g.task_id.toLowerCase().includes(word)));
    const key = KEYS[state.order];
    if (key) state.shown.sort((a, b) => (state.down ? -1 : 1) * compare(key(a), key(b)) || a.number - b.number);
    state.page = 0;
    list();
  }

  function order(name, down) {
    state.order = name;
    state.down = down;
    byId("order").value = name;
    for (const button of document.querySelectorAll("button.sort")) {
      const isIt = button.dataset.sort === name;
      button.parentElement.setAttribute("aria-sort", isIt ? (down ? "descending" : "ascending") : "none");
    }
    filter();
  }

  function list() {
    const body = byId("group-rows");
    body.replaceChildren();
    const first = state.page * PAGE;
    for (const g of state.shown.slice(first, first + PAGE)) {
      const row = make("tr");
      const link = make("a", g.task_id);
      link.href = "#group=" + g.number;
      const middle = mean(g), apart = spread(g);
      const cells = [["task", link], ["stage", g.stage], ["step", g.step],
        ["shown", g.arm ? ARMS[g.arm] || g.arm : "–"],
        ["mean", middle === null ? "–" : digits(middle)], ["spread", apart === null ? "–" : digits(apart)]];
      for (const [label, value] of cells) {
        const cell = make("td");
        cell.dataset.label = label;
        cell.append(value instanceof Node ? value : document.createTextNode(String(value)));
        row.append(cell);
      }
      const dots = make("td");
      dots.dataset.label = "rewards";
      for (const reward of g.rewards.slice(0, 12)) dots.append(rewardTag(reward, state.range), " ");
      if (g.rewards.length > 12) dots.append("+" + (g.rewards.length - 12));
      if (g.kinds.includes("worse")) dots.append(" ", make("span", "made worse", "tag bad"));
      if (g.kinds.includes("cut")) dots.append(" ", make("span", "cut", "tag"));
      row.append(dots);
      body.append(row);
    }
    const last = Math.min(first + PAGE, state.shown.length);
    byId("page-words").textContent = state.shown.length
      ? (first + 1) + "–" + last + " of " + state.shown.length : "no groups";
    byId("previous").disabled = first === 0;
    byId("next").disabled = last >= state.shown.length;
  }

  function block(title, text) {
    const card = make("div", null, "card");
    card.append(make("h3", title), make("pre", text));
    return card;
  }

  function messages(group) {
    const card = make("details", null, "card");
    card.open = true;
    card.append(make("summary", state.isFunction
      ? "What your function was given: the task, and what the library adds" : "The messages as sent"));
    const all = make("div", null, "copyable");
    all.append(copyButton("copy all"));
    for (const [role, text] of group.messages) {
      const turn = make("div", null, "turn " + role);
      turn.append(make("b", role), make("pre", text));
      all.append(turn);
    }
    card.append(all);
    return card;
  }

  async function show(number) {
    const entry = state.index[number];
    if (!entry) return;
    const group = (await chunk(entry.chunk))[entry.place];
    const view = byId("group-view");
    view.replaceChildren();
    const bar = make("div", null, "controls");
    const back = make("a", "← all groups");
    back.href = "#groups";
    bar.append(back);
    for (const [word, to] of [["previous group", number - 1], ["next group", number + 1]]) {
      if (!state.index[to]) continue;
      const link = make("a", word);
      link.href = "#group=" + to;
      bar.append(link);
    }
    view.append(bar, make("h1", group.task_id));
    view.append(make("p", [group.stage, "step " + group.step, ARMS[group.arm] || group.arm]
      .filter(Boolean).join(" · "), "note"));
    for (const other of state.index) {
      if (other.number === number || other.task_id !== group.task_id || other.stage !== group.stage ||
          !other.arm || other.arm === group.arm) continue;
      const link = make("a", "the same task with " + (ARMS[other.arm] || other.arm) + ", step " + other.step);
      link.href = "#group=" + other.number;
      const line = make("p");
      line.append(link);
      view.append(line);
    }
    const facts = make("div", null, "grid");
    facts.append(messages(group));
    const right = make("div", null, "column");
    right.append(block("Task", group.text));
    if (group.reference !== null) right.append(block("Reference (never shown to the policy)", group.reference));
    if (group.contrast) right.append(block("Contrast drawn from this group", group.contrast));
    facts.append(right);
    view.append(facts, make("h2", group.rollouts.length + (group.rollouts.length === 1 ? " attempt" : " attempts")));
    const grid = make("div", null, "rollouts");
    for (const r of group.rollouts) {
      const card = make("article", null, "card rollout");
      const head = make("header");
      head.append(make("b", "#" + r.sample_index), rewardTag(r.reward, state.range));
      if (r.outcome !== "graded") head.append(make("span", r.outcome.replace("_", " "), "tag bad"));
      if (r.is_truncated) head.append(make("span", "cut at the token limit", "tag"));
      head.append(make("span", r.tokens + (r.tokens === 1 ? " token written" : " tokens written"), "note"));
      card.append(head, make("pre", r.text || "(nothing)"));
      if (r.error) card.append(make("p", r.error, "bad"));
      if (r.feedback) card.append(make("p", "Verifier: " + r.feedback, "note"));
      if (r.summary) card.append(make("p", "Summary: " + r.summary, "note"));
      grid.append(card);
    }
    view.append(grid);
  }

  function copyButton(word) {
    const button = make("button", word, "copy");
    button.type = "button";
    return button;
  }

  async function copy(button) {
    const texts = [...button.parentElement.querySelectorAll("pre")].map((x) => x.textContent);
    const said = button.textContent;
    try {
      await navigator.clipboard.writeText(texts.join("\n\n"));
      button.textContent = "copied";
    } catch {
      const range = document.createRange();
      range.selectNodeContents(button.parentElement);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      button.textContent = "selected: copy it with the keyboard";
    }
    setTimeout(() => { button.textContent = said; }, 2000);
  }

  async function route() {
    const match = /^#group=(\d+)$/.exec(location.hash);
    byId("report").hidden = Boolean(match);
    byId("group-view").hidden = !match;
    if (match) {
      await show(Number(match[1]));
      scrollTo(0, 0);
    } else if (location.hash.length > 1) {
      const target = byId(location.hash.slice(1));
      if (target) target.scrollIntoView();
    }
  }

  async function startGroups() {
    const head = await chunk("index");
    state.index = head.groups;
    state.range = head.range;
    state.isFunction = head.is_function;
    const numbers = new Map(head.groups.map((g) => [g.group_id, g.number]));
    for (const link of document.querySelectorAll("a[data-group]")) {
      const number = numbers.get(link.dataset.group);
      if (number === undefined) link.removeAttribute("href");
      else link.href = "#group=" + number;
    }
    for (const id of ["stage", "kind"]) byId(id).addEventListener("change", filter);
    byId("order").addEventListener("change", () => order(byId("order").value, false));
    for (const button of document.querySelectorAll("button.sort"))
      button.addEventListener("click", () =>
        order(button.dataset.sort, state.order === button.dataset.sort && !state.down));
    byId("find").addEventListener("input", filter);
    byId("previous").addEventListener("click", () => { state.page -= 1; list(); });
    byId("next").addEventListener("click", () => { state.page += 1; list(); });
    addEventListener("hashchange", route);
    filter();
    await route();
  }

  const words = (s) => {
    if (s < 60) return Math.max(1, Math.round(s)) + " s";
    const m = Math.round(s / 60);
    return m < 60 ? m + " min" : Math.floor(m / 60) + " h " + (m % 60) + " min";
  };

  function showProgress(p) {
    const place = byId("live");
    place.hidden = !p.stages.length;
    place.replaceChildren();
    if (!p.stages.length) return;
    place.append(make("h2", p.ended ? "The run has ended" : p.is_quiet ? "Nothing heard for a while" : "Running"));
    for (const s of p.stages) {
      const row = make("div", null, "stage");
      const bar = make("progress");
      bar.max = Math.max(1, s.total);
      bar.value = s.done;
      bar.setAttribute("aria-label", s.stage);
      const isOver = s.done >= s.total;
      const parts = [s.done + " of " + s.total];
      if (isOver) parts.push("done");
      else if (!p.ended) {
        parts.push(s.in_flight + " in flight");
        if (s.rate > 0) parts.push((60 * s.rate).toFixed(s.rate < 1 ? 1 : 0) + " a minute",
          "about " + words((s.total - s.done) / s.rate) + " left");
      }
      if (s.failed) parts.push(s.failed + " failed");
      row.append(make("b", s.stage), bar, make("span", parts.join(", "), "note"));
      place.append(row);
    }
    if (p.spent) place.append(make("p", p.spent, "note"));
  }

  async function follow(version) {
    const opened = Date.now();
    for (;;) {
      const reply = await fetch("status", { cache: "no-store" }).catch(() => null);
      if (reply && reply.ok) {
        const told = await reply.json();
        if (told.progress && byId("live")) showProgress(told.progress);
        // A reader is not torn away: the page changes at most every 15 seconds, never under a group.
        const isReading = location.hash.startsWith("#group=");
        const isDue = Date.now() - opened > 15000 || (told.progress && told.progress.ended);
        if (told.version !== version && isDue && !isReading) location.reload();
      }
      document.documentElement.dataset.followed = "yes";
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }

  async function start() {
    document.addEventListener("click", (event) => {
      const button = event.target.closest("button.copy");
      if (button) copy(button);
    });
    if (byId("groups-index")) await startGroups();
    document.documentElement.dataset.ready = "yes";
    const live = document.documentElement.dataset.version;
    if (live) follow(live);
  }
  start();
})();
