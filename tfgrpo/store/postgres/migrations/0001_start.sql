-- The journals of many runs. Tables lie in `tfgrpo`, each row with its run; `tfgrpo_run` shows one
-- run's rows under the names and columns that an SQLite journal has, so that one text of SQL reads
-- both. Which run is a setting of the connection.

CREATE SCHEMA IF NOT EXISTS tfgrpo;
CREATE SCHEMA tfgrpo_run;
CREATE SCHEMA tfgrpo_old;

CREATE FUNCTION tfgrpo.run() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT nullif(current_setting('tfgrpo.run', true), '')::bigint $$;
CREATE FUNCTION tfgrpo.old() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT nullif(current_setting('tfgrpo.old', true), '')::bigint $$;

CREATE TABLE tfgrpo.runs (
  run bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text NOT NULL UNIQUE,
  made_at timestamptz NOT NULL DEFAULT clock_timestamp());

-- Row numbers rise over all runs, so that the newest of equal rows is the one with the largest.
CREATE SEQUENCE tfgrpo.row_number;
-- A writer takes a thousand numbers of calls at a time.
CREATE SEQUENCE tfgrpo.call_block INCREMENT 1000 START 1000;

-- What a run holds, as in an SQLite journal. ------------------------------------------------------

CREATE TABLE tfgrpo.meta (
  run bigint NOT NULL DEFAULT tfgrpo.run(),
  rowid bigint NOT NULL DEFAULT nextval('tfgrpo.row_number'),
  name text NOT NULL, value text NOT NULL,
  PRIMARY KEY (run, rowid));
CREATE TABLE tfgrpo.sessions (
  run bigint NOT NULL DEFAULT tfgrpo.run(),
  session bigint NOT NULL, event text NOT NULL, at double precision NOT NULL,
  elapsed_s double precision NOT NULL, pid bigint NOT NULL, host text NOT NULL);
CREATE INDEX ON tfgrpo.sessions (run, session);
CREATE TABLE tfgrpo.calls (
  run bigint NOT NULL DEFAULT tfgrpo.run(),
  call bigint NOT NULL, session bigint NOT NULL, at double precision NOT NULL, key bytea NOT NULL,
  stage text NOT NULL, model text NOT NULL, rollout_id text NOT NULL, n bigint NOT NULL,
  cost_usd double precision, prompt_tokens bigint NOT NULL, completion_tokens bigint NOT NULL,
  PRIMARY KEY (run, call));
CREATE INDEX ON tfgrpo.calls (run, session);
CREATE TABLE tfgrpo.results (
  run bigint NOT NULL DEFAULT tfgrpo.run(),
  call bigint NOT NULL, elapsed_s double precision NOT NULL, duration_s double precision NOT NULL,
  kind text NOT NULL, n bigint NOT NULL, calls bigint NOT NULL,
  uncached bigint NOT NULL, cache_read bigint NOT NULL, cache_write bigint NOT NULL,
  text bigint NOT NULL, reasoning bigint NOT NULL, cost_usd double precision,
  estimated bigint NOT NULL, model text NOT NULL, failure text NOT NULL, error text NOT NULL,
  PRIMARY KEY (run, call));
CREATE TABLE tfgrpo.completions (
  run bigint NOT NULL DEFAULT tfgrpo.run(),
  completion bigint NOT NULL DEFAULT nextval('tfgrpo.row_number'),
  key bytea NOT NULL, call bigint, finish text NOT NULL, body bytea NOT NULL, digest bytea NOT NULL,
  PRIMARY KEY (run, completion));
CREATE INDEX ON tfgrpo.completions (run, key);
CREATE TABLE tfgrpo.hits (
  run bigint NOT NULL DEFAULT tfgrpo.run(),
  stage text NOT NULL, model text NOT NULL, n bigint NOT NULL);
CREATE INDEX ON tfgrpo.hits (run);
CREATE TABLE tfgrpo.rollouts (
  run bigint NOT NULL DEFAULT tfgrpo.run(),
  rollout bigint NOT NULL DEFAULT nextval('tfgrpo.row_number'),
  rollout_id text NOT NULL, verifier_id text NOT NULL, group_id text NOT NULL,
  task_id text NOT NULL, outcome text NOT NULL, reward double precision, truncated bigint NOT NULL,
  body bytea NOT NULL, digest bytea NOT NULL,
  PRIMARY KEY (run, rollout));
CREATE INDEX ON tfgrpo.rollouts (run, rollout_id);
CREATE TABLE tfgrpo.texts (
  run bigint NOT NULL DEFAULT tfgrpo.run(), digest bytea NOT NULL, body bytea NOT NULL,
  PRIMARY KEY (run, digest));
CREATE TABLE tfgrpo.groups (
  run bigint NOT NULL DEFAULT tfgrpo.run(),
  grp bigint NOT NULL DEFAULT nextval('tfgrpo.row_number'),
  group_id text NOT NULL, stage text NOT NULL, task_id text NOT NULL, policy_id text NOT NULL,
  verifier_id text NOT NULL, task bytea NOT NULL, context bytea NOT NULL,
  body bytea NOT NULL, digest bytea NOT NULL,
  PRIMARY KEY (run, grp));
CREATE INDEX ON tfgrpo.groups (run, group_id);
CREATE TABLE tfgrpo.libraries (
  run bigint NOT NULL DEFAULT tfgrpo.run(),
  library bigint NOT NULL DEFAULT nextval('tfgrpo.row_number'),
  version_id text NOT NULL, at double precision NOT NULL, body bytea NOT NULL,
  digest bytea NOT NULL,
  PRIMARY KEY (run, library));
CREATE TABLE tfgrpo.decisions (
  run bigint NOT NULL DEFAULT tfgrpo.run(),
  decision bigint NOT NULL DEFAULT nextval('tfgrpo.row_number'),
  kind text NOT NULL, key text NOT NULL, at double precision NOT NULL, body bytea NOT NULL,
  digest bytea NOT NULL,
  PRIMARY KEY (run, decision));
CREATE INDEX ON tfgrpo.decisions (run, kind);
CREATE TABLE tfgrpo.set_aside (
  run bigint NOT NULL DEFAULT tfgrpo.run(), tbl text NOT NULL, row bigint NOT NULL,
  why text NOT NULL);
CREATE INDEX ON tfgrpo.set_aside (run, tbl, row);

-- Who writes, and what each writer holds. ---------------------------------------------------------

-- A writer's session is its fence: closed by itself, or by others once its lease is over, it can
-- no longer send, hold money or decide.
CREATE TABLE tfgrpo.writers (
  run bigint NOT NULL DEFAULT tfgrpo.run(), session bigint NOT NULL,
  role text NOT NULL, host text NOT NULL, pid bigint NOT NULL,
  machine text NOT NULL, born text NOT NULL,
  since timestamptz NOT NULL DEFAULT clock_timestamp(),
  lease_until timestamptz NOT NULL,
  closed_at timestamptz,
  is_dead boolean NOT NULL DEFAULT false,
  batch bigint NOT NULL DEFAULT 0,
  PRIMARY KEY (run, session)) WITH (fillfactor = 50);
CREATE UNIQUE INDEX one_learner ON tfgrpo.writers (run)
  WHERE role = 'learner' AND closed_at IS NULL;

-- Who asks for a draw. `dead_at`: when the call can no longer be under way.
CREATE TABLE tfgrpo.draws (
  run bigint NOT NULL DEFAULT tfgrpo.run(), key bytea NOT NULL, call bigint NOT NULL,
  session bigint NOT NULL, dead_at timestamptz NOT NULL, tries bigint NOT NULL DEFAULT 1,
  PRIMARY KEY (run, key));
-- Who makes a group.
CREATE TABLE tfgrpo.leases (
  run bigint NOT NULL DEFAULT tfgrpo.run(), group_id text NOT NULL, verifier_id text NOT NULL,
  session bigint NOT NULL,
  PRIMARY KEY (run, group_id, verifier_id));

-- Money and other capped amounts in units of 1e-12. `held` is what writers have drawn and not
-- spent. `overshoot` is what calls that used more than their worst case have passed the cap by.
CREATE TABLE tfgrpo.ledgers (
  run bigint NOT NULL DEFAULT tfgrpo.run(), resource text NOT NULL,
  cap numeric(60, 0) NOT NULL, spent numeric(60, 0) NOT NULL, held numeric(60, 0) NOT NULL,
  overshoot numeric(60, 0) NOT NULL, wanted_at timestamptz,
  PRIMARY KEY (run, resource),
  CHECK (held >= 0 AND spent >= 0 AND spent + held <= cap + overshoot)) WITH (fillfactor = 50);
CREATE TABLE tfgrpo.tranches (
  run bigint NOT NULL DEFAULT tfgrpo.run(), session bigint NOT NULL, resource text NOT NULL,
  held numeric(60, 0) NOT NULL,
  counted numeric(60, 0) NOT NULL DEFAULT 0,
  PRIMARY KEY (run, session, resource),
  CHECK (held >= 0)) WITH (fillfactor = 50);

-- Go on as a writer with transaction `p_batch`: prolongs the lease. TF001: the session is closed.
-- TF002: this transaction was committed before, and only its answer was lost.
CREATE FUNCTION tfgrpo.hold(p_session bigint, p_batch bigint, p_lease_s double precision)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  UPDATE tfgrpo.writers
     SET batch = p_batch,
         lease_until = greatest(lease_until, clock_timestamp() + p_lease_s * interval '1 second')
   WHERE run = tfgrpo.run() AND session = p_session AND closed_at IS NULL AND batch < p_batch;
  IF FOUND THEN
    RETURN;
  END IF;
  PERFORM FROM tfgrpo.writers
    WHERE run = tfgrpo.run() AND session = p_session AND batch >= p_batch;
  IF FOUND THEN
    RAISE EXCEPTION 'transaction % is committed', p_batch USING ERRCODE = 'TF002';
  END IF;
  RAISE EXCEPTION 'session % is closed', p_session USING ERRCODE = 'TF001';
END $$;

-- What the calls of a session (NULL: of all) add up to; a call without a result that can be
-- believed counts at its worst case.
CREATE FUNCTION tfgrpo.spent_of(p_session bigint)
RETURNS TABLE (resource text, amount numeric) LANGUAGE sql STABLE AS $$
  WITH sums AS (
    SELECT coalesce(sum(CASE WHEN s.settled THEN r.calls ELSE 1 END), 0) AS calls,
           coalesce(sum(CASE WHEN s.settled THEN r.uncached + r.cache_read + r.cache_write
                             ELSE c.prompt_tokens END), 0) AS prompt,
           coalesce(sum(CASE WHEN s.settled THEN r.text + r.reasoning
                             ELSE c.completion_tokens END), 0) AS completion,
           coalesce(sum(CASE WHEN s.settled THEN r.cost_usd ELSE c.cost_usd END::numeric), 0)
             AS cost
      FROM tfgrpo.calls c
      LEFT JOIN tfgrpo.results r ON r.run = c.run AND r.call = c.call
     CROSS JOIN LATERAL (SELECT coalesce(
         r.kind IN ('ok', 'rejected', 'not_sent')
         AND (r.cost_usd IS NULL OR r.cost_usd BETWEEN 0 AND 1e9)
         AND r.calls BETWEEN 0 AND 320000000 AND r.uncached BETWEEN 0 AND 320000000
         AND r.cache_read BETWEEN 0 AND 320000000 AND r.cache_write BETWEEN 0 AND 320000000
         AND r.text BETWEEN 0 AND 320000000 AND r.reasoning BETWEEN 0 AND 320000000,
         false) AS settled) s
     WHERE c.run = tfgrpo.run() AND (p_session IS NULL OR c.session = p_session))
  SELECT v.resource, round(v.amount * 1000000000000)
    FROM sums, LATERAL (VALUES ('calls', calls), ('prompt_tokens', prompt),
                               ('completion_tokens', completion), ('cost_usd', cost))
         AS v (resource, amount)
$$;

-- Put what the calls of a session add up to in the place of what was counted for it, and give back
-- what it held. Computes and never trusts.
CREATE FUNCTION tfgrpo.recount(p_session bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  now_spent record;
  mine tfgrpo.tranches;
BEGIN
  PERFORM 1 FROM tfgrpo.ledgers WHERE run = tfgrpo.run() ORDER BY resource FOR UPDATE;
  IF NOT FOUND THEN
    RETURN;
  END IF;
  INSERT INTO tfgrpo.tranches (session, resource, held)
    SELECT p_session, l.resource, 0 FROM tfgrpo.ledgers l WHERE l.run = tfgrpo.run()
    ON CONFLICT DO NOTHING;
  FOR now_spent IN SELECT * FROM tfgrpo.spent_of(p_session) LOOP
    SELECT * INTO mine FROM tfgrpo.tranches t
     WHERE t.run = tfgrpo.run() AND t.session = p_session AND t.resource = now_spent.resource;
    CONTINUE WHEN NOT FOUND;
    UPDATE tfgrpo.ledgers l
       SET spent = greatest(0, l.spent + now_spent.amount - mine.counted),
           held = l.held - mine.held,
           overshoot = greatest(l.overshoot, greatest(0, l.spent + now_spent.amount - mine.counted)
                                             + l.held - mine.held - l.cap)
     WHERE l.run = tfgrpo.run() AND l.resource = now_spent.resource;
    UPDATE tfgrpo.tranches t
       SET held = 0, counted = now_spent.amount
     WHERE t.run = tfgrpo.run() AND t.session = p_session AND t.resource = now_spent.resource;
  END LOOP;
END $$;

-- End a session; with `p_lapsed` only where its lease is over. True where this call ended it.
CREATE FUNCTION tfgrpo.close_session(p_session bigint, p_lapsed boolean, p_is_dead boolean)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  UPDATE tfgrpo.writers
     SET closed_at = clock_timestamp(), is_dead = p_is_dead
   WHERE run = tfgrpo.run() AND session = p_session AND closed_at IS NULL
     AND (NOT p_lapsed OR lease_until < clock_timestamp());
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  PERFORM tfgrpo.recount(p_session);
  RETURN true;
END $$;

-- True where a sound reply is kept under a key.
CREATE FUNCTION tfgrpo.answered(p_key bytea) RETURNS boolean LANGUAGE sql STABLE AS $$
  SELECT EXISTS (
    SELECT FROM tfgrpo.completions c
     WHERE c.run = tfgrpo.run() AND c.key = p_key
       AND NOT EXISTS (SELECT FROM tfgrpo.set_aside a
                        WHERE a.run = tfgrpo.run() AND a.tbl = 'completions'
                          AND a.row = c.completion))
$$;

-- Ask for draws with calls of a session; returns those that are its own. A draw is had where nobody
-- asks for it: no sound reply is kept, and the call that asked last has ended, or its writer is
-- gone and the call with it.
CREATE FUNCTION tfgrpo.claim(p_session bigint, p_keys bytea[], p_calls bigint[],
                             p_call_s double precision)
RETURNS TABLE (key bytea, call bigint) LANGUAGE sql AS $$
  INSERT INTO tfgrpo.draws AS d (key, call, session, dead_at)
    SELECT a.key, a.call, p_session, clock_timestamp() + p_call_s * interval '1 second'
      FROM unnest(p_keys, p_calls) AS a (key, call)
     WHERE NOT tfgrpo.answered(a.key)
     ORDER BY a.key
    ON CONFLICT (run, key) DO UPDATE
       SET call = excluded.call, session = excluded.session, dead_at = excluded.dead_at,
           tries = d.tries + 1
     WHERE EXISTS (SELECT FROM tfgrpo.results r WHERE r.run = d.run AND r.call = d.call)
        OR EXISTS (SELECT FROM tfgrpo.writers w
                    WHERE w.run = d.run AND w.session = d.session AND w.closed_at IS NOT NULL
                      AND (w.is_dead OR d.dead_at < clock_timestamp()))
    RETURNING d.key, d.call
$$;

-- One run's rows. ---------------------------------------------------------------------------------

CREATE VIEW tfgrpo_run.meta AS
  SELECT name, value, rowid FROM tfgrpo.meta WHERE run = tfgrpo.run();
CREATE VIEW tfgrpo_run.sessions AS
  SELECT session, event, at, elapsed_s, pid, host FROM tfgrpo.sessions WHERE run = tfgrpo.run();
CREATE VIEW tfgrpo_run.calls AS
  SELECT call, session, at, key, stage, model, rollout_id, n, cost_usd, prompt_tokens,
         completion_tokens
    FROM tfgrpo.calls WHERE run = tfgrpo.run();
CREATE VIEW tfgrpo_run.results AS
  SELECT call, elapsed_s, duration_s, kind, n, calls, uncached, cache_read, cache_write, text,
         reasoning, cost_usd, estimated, model, failure, error
    FROM tfgrpo.results WHERE run = tfgrpo.run();
CREATE VIEW tfgrpo_run.completions AS
  SELECT completion, key, call, finish, body, digest
    FROM tfgrpo.completions WHERE run = tfgrpo.run();
CREATE VIEW tfgrpo_run.hits AS
  SELECT stage, model, n FROM tfgrpo.hits WHERE run = tfgrpo.run();
CREATE VIEW tfgrpo_run.rollouts AS
  SELECT rollout, rollout_id, verifier_id, group_id, task_id, outcome, reward, truncated, body,
         digest
    FROM tfgrpo.rollouts WHERE run = tfgrpo.run();
CREATE VIEW tfgrpo_run.texts AS
  SELECT digest, body FROM tfgrpo.texts WHERE run = tfgrpo.run();
CREATE VIEW tfgrpo_run.groups AS
  SELECT grp, group_id, stage, task_id, policy_id, verifier_id, task, context, body, digest
    FROM tfgrpo.groups WHERE run = tfgrpo.run();
CREATE VIEW tfgrpo_run.libraries AS
  SELECT library, version_id, at, body, digest FROM tfgrpo.libraries WHERE run = tfgrpo.run();
CREATE VIEW tfgrpo_run.decisions AS
  SELECT decision, kind, key, at, body, digest FROM tfgrpo.decisions WHERE run = tfgrpo.run();
CREATE VIEW tfgrpo_run.set_aside AS
  SELECT tbl, row, why FROM tfgrpo.set_aside WHERE run = tfgrpo.run();
CREATE VIEW tfgrpo_run.live AS
  SELECT session FROM tfgrpo.writers WHERE run = tfgrpo.run() AND closed_at IS NULL;

-- What a fork takes over from the run that the setting `tfgrpo.old` names.
CREATE VIEW tfgrpo_old.completions AS
  SELECT completion, key, call, finish, body, digest
    FROM tfgrpo.completions WHERE run = tfgrpo.old();
CREATE VIEW tfgrpo_old.rollouts AS
  SELECT rollout, rollout_id, verifier_id, group_id, task_id, outcome, reward, truncated, body,
         digest
    FROM tfgrpo.rollouts WHERE run = tfgrpo.old();

-- Two functions that SQLite has.
CREATE FUNCTION tfgrpo_run.typeof(bigint) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT CASE WHEN $1 IS NULL THEN 'null' ELSE 'integer' END $$;
CREATE AGGREGATE tfgrpo_run.total(double precision) (
  SFUNC = float8pl, STYPE = double precision, INITCOND = '0', PARALLEL = SAFE,
  COMBINEFUNC = float8pl);
