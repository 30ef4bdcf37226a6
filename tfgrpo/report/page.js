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

  const state = { index: [], shown: [], page: 0 };
  const PAGE = matchMedia("(max-width: 40rem)").matches ? 12 : 25;

  function rewardTag(reward, range) {
    if (reward === null) return make("span", "no reward", "tag");
    const isGood = reward >= range[1] - 1e-9 && range[1] > range[0];
    const isBad = reward <= range[0] + 1e-9;
    return make("span", reward.toFixed(2).replace(/\.00$/, ""), "tag " + (isGood ? "good" : isBad ? "bad" : "accent"));
  }

  function filter() {
    const stage = byId("stage").value;
    const kind = byId("kind").value;
    const word = byId("find").value.toLowerCase();
    state.shown = state.index.filter((g) =>
      (!stage || g.stage === stage) &&
      (!kind || (kind === "mixed") === g.mixed) &&
      (!word || g.task_id.toLowerCase().includes(word)));
    state.page = 0;
    list();
  }

  function list() {
    const body = byId("group-rows");
    body.replaceChildren();
    const first = state.page * PAGE;
    for (const g of state.shown.slice(first, first + PAGE)) {
      const row = make("tr");
      const link = make("a", g.task_id);
      link.href = "#group=" + g.number;
      const cells = [["task", link], ["stage", g.stage], ["step", "step " + g.step], ["arm", g.arm || "–"]];
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
    view.append(make("p", [group.stage, "step " + group.step, group.arm, group.policy_id, group.group_id]
      .filter(Boolean).join(" · "), "note"));
    const facts = make("div", null, "grid");
    facts.append(block("Task", group.text));
    if (group.reference !== null) facts.append(block("Reference (never shown to the policy)", group.reference));
    if (group.context.length) facts.append(block("Context given", group.context.join("\n")));
    if (group.contrast) facts.append(block("Contrast drawn from this group", group.contrast));
    view.append(facts, make("h2", group.rollouts.length + " rollouts"));
    const grid = make("div", null, "rollouts");
    for (const r of group.rollouts) {
      const card = make("article", null, "card rollout");
      const head = make("header");
      head.append(make("b", "#" + r.sample_index), rewardTag(r.reward, state.range));
      if (r.outcome !== "graded") head.append(make("span", r.outcome.replace("_", " "), "tag bad"));
      if (r.is_truncated) head.append(make("span", "cut at the token limit", "tag"));
      head.append(make("span", r.tokens + " tokens", "note"));
      card.append(head, make("pre", r.text || "(nothing)"));
      if (r.error) card.append(make("p", r.error, "bad"));
      if (r.feedback) card.append(make("p", "Verifier: " + r.feedback, "note"));
      if (r.summary) card.append(make("p", "Summary: " + r.summary, "note"));
      grid.append(card);
    }
    view.append(grid);
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

  async function start() {
    const head = await chunk("index");
    state.index = head.groups;
    state.range = head.range;
    const numbers = new Map(head.groups.map((g) => [g.group_id, g.number]));
    for (const link of document.querySelectorAll("a[data-group]")) {
      const number = numbers.get(link.dataset.group);
      if (number === undefined) link.removeAttribute("href");
      else link.href = "#group=" + number;
    }
    for (const id of ["stage", "kind"]) byId(id).addEventListener("change", filter);
    byId("find").addEventListener("input", filter);
    byId("previous").addEventListener("click", () => { state.page -= 1; list(); });
    byId("next").addEventListener("click", () => { state.page += 1; list(); });
    addEventListener("hashchange", route);
    filter();
    await route();
    document.documentElement.dataset.ready = "yes";
  }

  async function follow(version) {
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, 3000));
      const reply = await fetch("version", { cache: "no-store" }).catch(() => null);
      if (reply && reply.ok && (await reply.text()) !== version) location.reload();
    }
  }

  const live = document.documentElement.dataset.version;
  if (live) follow(live);
  start();
})();
