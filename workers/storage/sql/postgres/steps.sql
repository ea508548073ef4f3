-- The steps of a queue that are one round trip each on PostgreSQL; `migrate` puts them beside the tables. Rarer ones
-- are statements in Python: cancel, retry, remove (`steps/manage.py`), recover (`steps/ends.py`), stops (`stops.py`).
--
-- Theory of operation. Each statement in a function sees what was committed before it (READ COMMITTED), so a step locks
-- first and looks afterwards. Every step takes its locks in one order: ordering keys (advisory, sorted), then rows by
-- number. A claim never waits: it skips rows and keys that another transaction has locked. Times are the server's, in
-- milliseconds since 1970.
--
-- The tables' statistics may be from a time when the queue was empty, or full. In every statement here the index is
-- always the right choice, so the planner's others are switched off. Where it cannot choose another order of joins either,
-- one plan serves all arrays: to plan anew took a tenth of the time of a claim. Where a row is found by its number,
-- everything else is compared by IS NOT DISTINCT FROM, which no index can serve.

CREATE OR REPLACE FUNCTION workers_now() RETURNS bigint LANGUAGE sql VOLATILE
AS $$ SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint $$;

CREATE OR REPLACE FUNCTION workers_key(p_queue integer, p_key text) RETURNS bigint LANGUAGE sql IMMUTABLE
AS $$ SELECT hashtextextended(p_key, p_queue) $$;

-- Lock the ordering keys of these jobs until the transaction ends: nobody else looks at or changes who waits for them.
CREATE OR REPLACE FUNCTION workers_lock_keys(p_queue integer, p_seqs bigint[]) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_key bigint;
BEGIN
    FOR v_key IN
        SELECT DISTINCT workers_key(p_queue, ordering_key) FROM workers_jobs
        WHERE seq = ANY(p_seqs) AND ordering_key IS NOT NULL ORDER BY 1
    LOOP
        PERFORM pg_advisory_xact_lock(v_key);
    END LOOP;
END $$;

-- Make the first held job of every name ready, for each of the keys; the caller has locked the keys. Of a fair key only
-- names without a front.
CREATE OR REPLACE FUNCTION workers_unhold(p_queue integer, p_keys text[]) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    v_key text;
    v_name text;
BEGIN
    FOR v_key IN SELECT DISTINCT key FROM unnest(p_keys) AS key WHERE key IS NOT NULL LOOP
        v_name := '';
        LOOP
            SELECT name INTO v_name FROM workers_jobs
            WHERE queue = p_queue AND state = 'held' AND ordering_key = v_key AND name > v_name
            ORDER BY name LIMIT 1;
            EXIT WHEN v_name IS NULL;
            CONTINUE WHEN left(v_key, 2) = E'\x1eF' AND workers_has_front(p_queue, v_key, v_name, 0);
            UPDATE workers_jobs SET state = 'ready' WHERE seq = (
                SELECT seq FROM workers_jobs
                WHERE queue = p_queue AND state = 'held' AND ordering_key = v_key AND name = v_name
                ORDER BY priority, run_at, seq LIMIT 1
            ) AND state IS NOT DISTINCT FROM 'held';  -- somebody may have cancelled it meanwhile
        END LOOP;
    END LOOP;
END $$;

-- Tell who listens, with the commit, and write it down for those who cannot listen (see `driver/listener.py`).
CREATE OR REPLACE FUNCTION workers_notify(p_channel text, p_payload text) RETURNS void LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM pg_notify(p_channel, p_payload);
    IF EXISTS (SELECT FROM workers_listeners WHERE queue = 0 AND expires_at > workers_now()) THEN
        INSERT INTO workers_told (seq, txid, channel, payload, told_at)
        VALUES (nextval('workers_told_seq_seq'), txid_current(), p_channel, p_payload, workers_now());
    END IF;
END $$;

-- Tell whether somebody may subscribe to the queue's events by the time that this transaction commits.
--
-- A subscriber registers under an exclusive lock, which it gets when every step that did not see it has committed. A step
-- that finds somebody registering sends its events to be safe. So every event that is committed after a subscription was
-- confirmed is sent, and no step waits for a subscriber. The lock is taken before a statement of its own looks.
CREATE OR REPLACE FUNCTION workers_is_heard(p_queue integer) RETURNS boolean LANGUAGE plpgsql
AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock_shared(workers_key(p_queue, 'workers_listeners')) THEN
        RETURN true;
    END IF;
    RETURN EXISTS (SELECT FROM workers_listeners WHERE queue = p_queue AND expires_at > workers_now());
END $$;

-- With the commit, let waiters look again (p_wake) and subscribers hear the events, each as `kind:id`. In front of an end
-- there may be its result, as `result:base64 id`, which goes to a channel of its own. Events are only sent while somebody
-- subscribes to the queue; p_sure: the caller knows so, or does not know when it commits.
CREATE OR REPLACE FUNCTION workers_tell(p_queue integer, p_events text[], p_wake boolean, p_sure boolean DEFAULT false)
RETURNS void LANGUAGE plpgsql
AS $$
#variable_conflict use_column
DECLARE
    v_part text := '';
    v_event text;
BEGIN
    IF p_wake THEN
        PERFORM pg_notify('workers_wake', p_queue::text);
    END IF;
    IF cardinality(p_events) = 0 THEN
        RETURN;
    END IF;
    IF NOT p_sure AND NOT workers_is_heard(p_queue) THEN
        RETURN;
    END IF;
    FOREACH v_event IN ARRAY p_events LOOP
        IF starts_with(v_event, 'result:') THEN
            PERFORM workers_notify('workers_results', p_queue || ' ' || substr(v_event, 8));
            CONTINUE;
        END IF;
        v_event := replace(replace(v_event, '%', '%25'), ' ', '%20');
        IF octet_length(v_part) + octet_length(v_event) > 7000 THEN
            PERFORM workers_notify('workers_events', p_queue || v_part);
            v_part := '';
        END IF;
        v_part := v_part || ' ' || v_event;
    END LOOP;
    PERFORM workers_notify('workers_events', p_queue || v_part);
END $$;

CREATE OR REPLACE FUNCTION workers_listen(p_queue integer, p_process text, p_for bigint) RETURNS void LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(workers_key(p_queue, 'workers_listeners'));
    INSERT INTO workers_listeners (queue, process, expires_at) VALUES (p_queue, p_process, workers_now() + p_for)
    ON CONFLICT (queue, process) DO UPDATE SET expires_at = excluded.expires_at;
END $$;

-- Insert a job unless its id is taken, which is told by false; `workers_enqueue` knows by what. Most producers do this,
-- and so it takes three quarters of the time. Each query in a function has a beginning and an end of its own: what is
-- assigned is none, and `workers_tell` is called only for those who hear (see `workers_is_heard`).
CREATE OR REPLACE FUNCTION workers_enqueue_one(
    p_queue integer, p_id text, p_name text, p_delay bigint, p_priority integer, p_max_attempts integer,
    p_keep_completed bigint, p_keep_failed bigint, p_key text, p_backoff text, p_payload bytea, p_chain_index integer,
    p_meta text, p_sure boolean, p_wake boolean
) RETURNS boolean LANGUAGE plpgsql
AS $$
DECLARE
    v_now bigint := workers_now();
    v_seq bigint := nextval('workers_jobs_seq_seq');
    v_told text;
BEGIN
    INSERT INTO workers_jobs (seq, queue, id, name, state, priority, run_at, created_at, max_attempts, keep_completed,
        keep_failed, ordering_key, backoff, chain_index, meta)
    VALUES (v_seq, p_queue, p_id, p_name, CASE WHEN p_delay > 0 THEN 'scheduled' ELSE 'ready' END, p_priority,
        v_now + p_delay, v_now, p_max_attempts, p_keep_completed, p_keep_failed, p_key, p_backoff, p_chain_index, p_meta)
    ON CONFLICT (queue, id) DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO workers_payloads (seq, data) VALUES (v_seq, p_payload);
    IF p_wake THEN
        v_told := pg_notify('workers_wake', p_queue::text);
    END IF;
    IF NOT p_sure AND pg_try_advisory_xact_lock_shared(workers_key(p_queue, 'workers_listeners')) THEN
        IF NOT EXISTS (SELECT FROM workers_listeners WHERE queue = p_queue AND expires_at > v_now) THEN
            RETURN true;
        END IF;
    END IF;
    PERFORM workers_tell(p_queue, ARRAY['queued:' || p_id], false, true);
    RETURN true;
END $$;

-- Insert each job, or return what has its id already; one row for every id given. Hash joins are only of what is given
-- with what was inserted: there may be 100 000.
CREATE OR REPLACE FUNCTION workers_enqueue(
    p_queue integer, p_ids text[], p_names text[], p_delays bigint[], p_priorities integer[], p_max_attempts integer[],
    p_keep_completed bigint[], p_keep_failed bigint[], p_keys text[], p_backoffs text[], p_payloads bytea[],
    p_chain_indexes integer[], p_metas text[], p_sure boolean, p_wake boolean DEFAULT true
) RETURNS TABLE (id text, inserted boolean, state text, run_at bigint, now bigint, result bytea) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_mergejoin = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := workers_now();
    v_left text[] := p_ids;
    v_first_round boolean := true;
    v_new text[];
    v_inserted text[] := '{}';
    v_stale bigint[];
BEGIN
    LOOP
        SELECT array_agg(j.seq) INTO v_stale FROM (
            SELECT seq FROM workers_jobs WHERE queue = p_queue AND id = ANY(v_left)
            AND (state IN ('failed', 'cancelled') OR expires_at <= v_now) ORDER BY seq FOR UPDATE
        ) j;
        IF v_stale IS NOT NULL THEN
            DELETE FROM workers_jobs WHERE seq = ANY(v_stale);
            DELETE FROM workers_payloads WHERE seq = ANY(v_stale);
        END IF;
        WITH asked AS MATERIALIZED (
            SELECT a.*, nextval('workers_jobs_seq_seq') AS seq FROM (
                SELECT * FROM unnest(
                    p_ids, p_names, p_delays, p_priorities, p_max_attempts, p_keep_completed, p_keep_failed, p_keys,
                    p_backoffs, p_payloads, p_chain_indexes, p_metas
                ) WITH ORDINALITY AS a (
                    id, name, delay, priority, max_attempts, keep_completed, keep_failed, key, backoff, payload,
                    chain_index, meta, place
                ) WHERE v_first_round OR a.id = ANY(v_left) ORDER BY place  -- the array is searched from its beginning
            ) a
        ), jobs AS (
            -- Ordered by id, so that batches with ids in common cannot deadlock.
            INSERT INTO workers_jobs (seq, queue, id, name, state, priority, run_at, created_at, max_attempts,
                keep_completed, keep_failed, ordering_key, backoff, chain_index, meta)
            SELECT a.seq, p_queue, a.id, a.name, CASE WHEN a.delay > 0 THEN 'scheduled' ELSE 'ready' END, a.priority,
                v_now + a.delay, v_now, a.max_attempts, a.keep_completed, a.keep_failed, a.key, a.backoff,
                a.chain_index, a.meta
            FROM asked a ORDER BY a.id
            ON CONFLICT (queue, id) DO NOTHING RETURNING seq, id
        ), payloads AS (
            INSERT INTO workers_payloads (seq, data) SELECT j.seq, a.payload FROM jobs j JOIN asked a USING (seq)
        )
        SELECT array_agg(j.id ORDER BY j.seq) INTO v_new FROM jobs j;
        v_first_round := false;
        v_inserted := v_inserted || v_new;
        RETURN QUERY SELECT n, true, NULL::text, NULL::bigint, v_now, NULL::bytea FROM unnest(v_new) n;
        EXIT WHEN cardinality(v_new) = cardinality(v_left);
        v_left := ARRAY(SELECT l FROM unnest(v_left) l EXCEPT SELECT n FROM unnest(v_new) n);
        EXIT WHEN cardinality(v_left) = 0;
        v_new := '{}';
        FOR id, inserted, state, run_at, now, result IN
            SELECT j.id, false, j.state, j.run_at, v_now,
                CASE WHEN j.state = 'completed' THEN (SELECT data FROM workers_payloads p WHERE p.seq = j.seq) END
            FROM workers_jobs j WHERE queue = p_queue AND j.id = ANY(v_left)
            AND j.state NOT IN ('failed', 'cancelled') AND (expires_at IS NULL OR expires_at > v_now)
        LOOP
            v_new := v_new || id;
            RETURN NEXT;
        END LOOP;
        -- What is left now are jobs that ended between the insert and the look.
        v_left := ARRAY(SELECT l FROM unnest(v_left) l EXCEPT SELECT n FROM unnest(v_new) n);
        EXIT WHEN cardinality(v_left) = 0;
    END LOOP;
    IF cardinality(v_inserted) > 0 THEN
        PERFORM workers_tell(p_queue, CASE
            WHEN p_sure OR workers_is_heard(p_queue) THEN ARRAY(SELECT 'queued:' || n FROM unnest(v_inserted) n)
            ELSE '{}'
        END, p_wake, true);
    END IF;
END $$;

-- Claim up to p_limit ready jobs in order; p_any is the lease of names not listed, NULL if those are not wanted.
CREATE OR REPLACE FUNCTION workers_candidates(p_queue integer, p_names text[], p_any boolean, p_limit integer)
RETURNS TABLE (seq bigint, ordering_key text, name text) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan
SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    IF p_any THEN
        RETURN QUERY SELECT j.seq, j.ordering_key, j.name FROM workers_jobs j
        WHERE queue = p_queue AND state = 'ready' ORDER BY priority, run_at, seq LIMIT p_limit FOR UPDATE SKIP LOCKED;
    ELSIF cardinality(p_names) = 1 THEN
        RETURN QUERY SELECT j.seq, j.ordering_key, j.name FROM workers_jobs j
        WHERE queue = p_queue AND j.name = p_names[1] AND state = 'ready'
        ORDER BY priority, run_at, seq LIMIT p_limit FOR UPDATE SKIP LOCKED;
    ELSE
        RETURN QUERY SELECT c.seq, c.ordering_key, c.name FROM unnest(p_names) AS wanted, LATERAL (
            SELECT j.seq, j.ordering_key, j.name, j.priority, j.run_at FROM workers_jobs j
            WHERE queue = p_queue AND j.name = wanted AND state = 'ready'
            ORDER BY priority, run_at, seq LIMIT p_limit FOR UPDATE SKIP LOCKED
        ) c ORDER BY c.priority, c.run_at, c.seq LIMIT p_limit;
    END IF;
END $$;

CREATE OR REPLACE FUNCTION workers_see(p_queue integer, p_workers text[], p_noted bigint) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_now bigint := workers_now();
BEGIN
    IF cardinality(p_workers) = 1 THEN  -- most often it was noted a moment ago
        PERFORM FROM workers_seen s WHERE s.queue = p_queue AND s.worker = p_workers[1] AND v_now - s.seen_at < p_noted;
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    INSERT INTO workers_seen (queue, worker, seen_at)
    SELECT p_queue, w, v_now FROM (SELECT DISTINCT unnest(p_workers) AS w ORDER BY w) asked
    WHERE NOT EXISTS (
        SELECT FROM workers_seen s WHERE s.queue = p_queue AND s.worker = w AND v_now - s.seen_at < p_noted
    )
    ON CONFLICT (queue, worker) DO UPDATE SET seen_at = excluded.seen_at;
END $$;

CREATE OR REPLACE FUNCTION workers_claim(
    p_queue integer, p_worker text, p_names text[], p_leases bigint[], p_any bigint, p_limit integer, p_secret bytea,
    p_noted bigint
) RETURNS TABLE (
    seq bigint, id text, name text, attempts integer, max_attempts integer, created_at bigint, keep_completed bigint,
    keep_failed bigint, priority integer, backoff text, chain_index integer, meta text, error text,
    payload bytea, place integer
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := workers_now();
    v_job record;
    v_seen integer;
    v_seqs bigint[] := '{}';
    v_held bigint[];
    v_passed bigint[] := '{}';
    v_busy text[] := '{}';
    v_locked text[] := '{}';
    v_limit integer := p_limit;
    v_round integer := 1;
    v_gated boolean;
    v_room record;
    v_paused integer;
    v_own text[] := '{}';  -- keys that this claim has locked
    v_taken text[] := '{}';  -- the key of each job taken
    v_passes text[];  -- keys of limits, each with a name, that jobs of this round have passed
    v_met text[];
    v_turns text[] := '{}';  -- fair keys, each with a name, that had a turn and have no front
    v_turned text[] := '{}';
    v_came_up boolean;
    v_looked_on boolean := false;
    v_keyed boolean := true;
BEGIN
    PERFORM workers_see(p_queue, ARRAY[p_worker], p_noted);
    SELECT q.paused, EXISTS (SELECT FROM workers_gates g WHERE g.queue = p_queue)
        OR EXISTS (SELECT FROM workers_limits l WHERE l.queue = p_queue)
    INTO v_paused, v_gated FROM workers_queues q WHERE q.id = p_queue;
    IF p_limit < 1 OR v_paused <> 0 THEN
        RETURN;
    END IF;
    IF v_gated THEN
        PERFORM workers_open_gates(p_queue, v_now * 1000);
        IF EXISTS (SELECT FROM workers_limits l WHERE l.queue = p_queue AND l.name = '*') THEN
            PERFORM pg_advisory_xact_lock(workers_key(p_queue, E'\x1eQ'));
            SELECT * INTO v_room FROM workers_room(p_queue, E'\x1eQ', 0, v_now * 1000);
            v_limit := least(v_limit, v_room.room);
            IF v_limit < 1 THEN
                RETURN;
            END IF;
        END IF;
    END IF;
    IF EXISTS (
        SELECT FROM workers_jobs j
        WHERE queue = p_queue AND state IN ('scheduled', 'failing') AND run_at <= v_now ORDER BY run_at LIMIT 1
    ) THEN
        UPDATE workers_jobs SET state = 'ready' WHERE seq = ANY(ARRAY(
            SELECT j.seq FROM workers_jobs j
            WHERE queue = p_queue AND state IN ('scheduled', 'failing') AND run_at <= v_now
            ORDER BY run_at LIMIT greatest(p_limit, 1000) FOR UPDATE SKIP LOCKED
        ));
    END IF;
    -- Most often nothing is held back, and whatever comes first can be taken.
    IF NOT v_gated THEN
        SELECT coalesce(array_agg(c.seq), '{}'), count(c.ordering_key) > 0 INTO v_seqs, v_keyed
        FROM workers_candidates(p_queue, p_names, p_any IS NOT NULL, v_limit) c;
    END IF;
    IF v_keyed THEN
        v_seqs := '{}';
    END IF;
    WHILE v_keyed AND v_round <= 8 LOOP
        v_held := '{}';
        v_passes := '{}';
        v_met := '{}';
        v_seen := 0;
        FOR v_job IN
            SELECT c.seq, c.ordering_key, c.name FROM workers_candidates(
                p_queue, p_names, p_any IS NOT NULL,
                CASE WHEN v_round = 1 AND cardinality(v_own) = 0 THEN v_limit
                    ELSE v_limit + cardinality(v_passed) + 500 END
            ) c
        LOOP
            v_seen := v_seen + 1;
            IF v_job.ordering_key IS NULL THEN
                IF cardinality(v_seqs) < v_limit AND v_job.seq <> ALL(v_seqs) THEN
                    v_seqs := v_seqs || v_job.seq;
                END IF;
            ELSIF left(v_job.ordering_key, 1) = E'\x1e' THEN
                CONTINUE WHEN v_job.seq = ANY(v_seqs) OR v_job.seq = ANY(v_passed);
                CONTINUE WHEN cardinality(v_seqs) >= v_limit
                    AND workers_turn(v_job.ordering_key, v_job.name) <> ALL(v_turned);
                IF v_job.ordering_key <> ALL(v_own) THEN
                    IF v_job.ordering_key = ANY(v_locked)
                        OR NOT pg_try_advisory_xact_lock(workers_key(p_queue, v_job.ordering_key)) THEN
                        v_locked := v_locked || v_job.ordering_key;
                        v_passed := v_passed || v_job.seq;
                        CONTINUE;
                    END IF;
                    v_own := v_own || v_job.ordering_key;
                END IF;
                IF workers_passes(
                    p_queue, v_job.seq, v_job.ordering_key, v_job.name,
                    coalesce(cardinality(array_positions(v_taken, v_job.ordering_key)), 0), v_turned, v_now * 1000
                ) THEN
                    v_seqs := v_seqs || v_job.seq;
                    v_taken := v_taken || v_job.ordering_key;
                    IF left(v_job.ordering_key, 2) = E'\x1eF' THEN
                        v_turned := v_turned || workers_turn(v_job.ordering_key, v_job.name);
                        v_turns := v_turns || ARRAY[v_job.ordering_key, v_job.name];
                    ELSIF workers_turn(v_job.ordering_key, v_job.name) <> ALL(v_met) THEN
                        v_met := v_met || workers_turn(v_job.ordering_key, v_job.name);
                        v_passes := v_passes || ARRAY[v_job.ordering_key, v_job.name];
                    END IF;
                ELSE
                    v_held := v_held || v_job.seq;
                END IF;
            ELSIF v_job.ordering_key = ANY(v_busy) THEN
                IF v_job.seq <> ALL(v_seqs) THEN
                    v_held := v_held || v_job.seq;
                END IF;
            ELSIF v_job.ordering_key = ANY(v_locked)
                OR NOT pg_try_advisory_xact_lock(workers_key(p_queue, v_job.ordering_key)) THEN
                v_locked := v_locked || v_job.ordering_key;
                v_passed := v_passed || v_job.seq;
            ELSIF EXISTS (
                SELECT FROM workers_jobs j
                WHERE queue = p_queue AND state = 'processing' AND ordering_key = v_job.ordering_key
            ) THEN
                v_busy := v_busy || v_job.ordering_key;
                v_held := v_held || v_job.seq;
            ELSIF cardinality(v_seqs) < v_limit THEN
                v_busy := v_busy || v_job.ordering_key;
                v_seqs := v_seqs || v_job.seq;
            END IF;
        END LOOP;
        IF cardinality(v_held) > 0 THEN
            UPDATE workers_jobs SET state = 'held' WHERE seq = ANY(v_held);
        END IF;
        v_came_up := false;
        FOR v_at IN 1..cardinality(v_passes) / 2 LOOP
            v_came_up := workers_come_up(
                p_queue, v_passes[2 * v_at - 1], v_passes[2 * v_at],
                coalesce(cardinality(array_positions(v_taken, v_passes[2 * v_at - 1])), 0),
                v_limit - cardinality(v_seqs), v_now * 1000
            ) OR v_came_up;
        END LOOP;
        v_passes := v_turns;
        v_turns := '{}';
        v_turned := '{}';
        FOR v_at IN 1..cardinality(v_passes) / 2 LOOP
            IF workers_come_up(p_queue, v_passes[2 * v_at - 1], v_passes[2 * v_at], 0, 1, v_now * 1000) THEN
                v_came_up := true;
            ELSE
                v_turns := v_turns || v_passes[2 * v_at - 1 : 2 * v_at];
                v_turned := v_turned || workers_turn(v_passes[2 * v_at - 1], v_passes[2 * v_at]);
            END IF;
        END LOOP;
        EXIT WHEN v_seen = 0;
        IF cardinality(v_seqs) >= v_limit OR (
            cardinality(v_held) = 0 AND NOT v_came_up AND (v_round > 1 OR cardinality(v_passed) = 0)
        ) THEN
            -- Jobs of a fair key that had its turn may be ready behind those that were seen.
            EXIT WHEN v_looked_on OR cardinality(v_turns) = 0;
            v_looked_on := true;
        END IF;
        IF NOT v_came_up THEN
            v_round := v_round + 1;
        END IF;
    END LOOP;
    IF v_gated AND cardinality(v_seqs) > 0 THEN
        PERFORM workers_take_tokens(p_queue, E'\x1eQ', cardinality(v_seqs), v_now * 1000);
    END IF;
    IF cardinality(v_seqs) = 0 THEN
        RETURN;
    END IF;
    RETURN QUERY UPDATE workers_jobs j SET
        state = 'processing', attempts = j.attempts + 1, token = p_secret, worker = p_worker,
        lease_until = v_now + coalesce(p_leases[array_position(p_names, j.name)], p_any),
        deduplication_key = CASE j.deduplication_mode WHEN 'debounce' THEN NULL ELSE j.deduplication_key END
    WHERE j.seq = ANY(v_seqs)
    RETURNING j.seq, j.id, j.name, j.attempts, j.max_attempts, j.created_at, j.keep_completed, j.keep_failed,
        j.priority, j.backoff, j.chain_index, j.meta, j.error, (SELECT data FROM workers_payloads p WHERE p.seq = j.seq),
        array_position(v_seqs, j.seq);
    IF workers_is_heard(p_queue) THEN
        PERFORM workers_tell(
            p_queue, ARRAY(SELECT 'active:' || j.id FROM workers_jobs j WHERE j.seq = ANY(v_seqs)), false, true
        );
    END IF;
END $$;

-- Return the milliseconds until a claim for these names may succeed, 0 for now; NULL if there is nothing to wait for.
CREATE OR REPLACE FUNCTION workers_claimable_in(p_queue integer, p_names text[], p_any boolean) RETURNS bigint
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_name text;
    v_paused integer;
    v_gated boolean;
    v_now bigint := workers_now();
    v_room record;
    v_opens bigint;
BEGIN
    SELECT q.paused, EXISTS (SELECT FROM workers_gates g WHERE g.queue = p_queue)
        OR EXISTS (SELECT FROM workers_limits l WHERE l.queue = p_queue)
    INTO v_paused, v_gated FROM workers_queues q WHERE q.id = p_queue;
    IF v_paused <> 0 THEN
        RETURN NULL;
    END IF;
    IF v_gated THEN
        SELECT min(g.opens_at) INTO v_opens FROM workers_gates g WHERE g.queue = p_queue AND g.opens_at IS NOT NULL;
        SELECT * INTO v_room FROM workers_full(p_queue, v_now * 1000);
        IF v_room.room = 0 THEN
            -- No job at all starts until a token is there, or one ends, which wakes whoever waits.
            RETURN CASE WHEN v_room.opens_at IS NOT NULL
                THEN greatest(0, ceil((v_room.opens_at - v_now * 1000) / 1000.0)) END;
        END IF;
        v_opens := ceil(v_opens / 1000.0);
    END IF;
    IF p_any THEN
        PERFORM FROM workers_jobs WHERE queue = p_queue AND state = 'ready' ORDER BY priority, run_at, seq LIMIT 1;
        IF FOUND THEN
            RETURN 0;
        END IF;
    ELSE
        FOREACH v_name IN ARRAY p_names LOOP
            PERFORM FROM workers_jobs WHERE queue = p_queue AND state = 'ready' AND name = v_name
            ORDER BY priority, run_at, seq LIMIT 1;
            IF FOUND THEN
                RETURN 0;
            END IF;
        END LOOP;
    END IF;
    v_opens := least(v_opens, (
        SELECT run_at FROM workers_jobs
        WHERE queue = p_queue AND state IN ('scheduled', 'failing') ORDER BY run_at LIMIT 1
    ));
    RETURN CASE WHEN v_opens IS NOT NULL THEN greatest(0, v_opens - workers_now()) END;
END $$;

-- Extend the claims that hold their job; return their places, and whether a cancel was requested.
CREATE OR REPLACE FUNCTION workers_renew(
    p_queue integer, p_seqs bigint[], p_tokens bytea[], p_ids text[], p_leases bigint[], p_workers text[],
    p_noted bigint
) RETURNS TABLE (place bigint, cancel_requested integer) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
#variable_conflict use_column
BEGIN
    PERFORM FROM workers_jobs j WHERE j.seq = ANY(p_seqs) ORDER BY j.seq FOR UPDATE;
    RETURN QUERY UPDATE workers_jobs j SET lease_until = workers_now() + a.lease
    FROM unnest(p_seqs, p_tokens, p_ids, p_leases) WITH ORDINALITY AS a (seq, token, id, lease, place)
    WHERE j.seq = a.seq AND (j.queue, j.token, j.id) IS NOT DISTINCT FROM (p_queue, a.token, a.id)
        AND j.state = 'processing'
    RETURNING a.place, j.cancel_requested;
    PERFORM workers_see(p_queue, p_workers, p_noted);
END $$;

-- Store the progress of each claim that holds its job. Every token occurs once.
CREATE OR REPLACE FUNCTION workers_progress(
    p_queue integer, p_seqs bigint[], p_tokens bytea[], p_ids text[], p_reported bytea[]
) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    v_events text[];
BEGIN
    PERFORM FROM workers_jobs j WHERE j.seq = ANY(p_seqs) ORDER BY j.seq FOR UPDATE;
    WITH reported AS (
        UPDATE workers_jobs j SET progress = a.progress
        FROM unnest(p_seqs, p_tokens, p_ids, p_reported) AS a (seq, token, id, progress)
        WHERE j.seq = a.seq AND (j.queue, j.token, j.id) IS NOT DISTINCT FROM (p_queue, a.token, a.id)
            AND j.state = 'processing'
        RETURNING j.id
    )
    SELECT coalesce(array_agg('progress:' || r.id), '{}') INTO v_events FROM reported r;
    PERFORM workers_tell(p_queue, v_events, false);
END $$;

-- Settle, and return each outcome by its place. p_kinds: completed, continued, failed, retried, postponed, uncounted,
-- released; p_keeps: NULL drops the record; p_capped: the error of an uncounted retry that is the job's last after all;
-- p_results: a result, or the payload of a continued job; p_thens: all else of that job, as JSON. Every token occurs
-- once.
CREATE OR REPLACE FUNCTION workers_settle(
    p_queue integer, p_seqs bigint[], p_tokens bytea[], p_ids text[], p_kinds text[], p_keeps bigint[],
    p_delays bigint[], p_errors text[], p_capped text[], p_results bytea[], p_thens text[],
    p_uncounted_limit integer, p_sure boolean
) RETURNS TABLE (place bigint, outcome text) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := workers_now();
    v_job record;
    v_then record;
    v_seq bigint;
    v_dropped bigint[] := '{}';
    v_keys text[] := '{}';
    v_events text[] := '{}';
    v_kind text;
    v_wake boolean := false;
    v_ended integer[] := '{}';
BEGIN
    -- What most jobs do is complete, without a key and without others that wait for them: all of them in two statements.
    -- Each finds its rows by the array, in the order of their numbers, whatever the planner takes the table's size for.
    IF p_kinds <@ ARRAY['completed'] AND array_position(p_keeps, NULL) IS NULL AND NOT EXISTS (
        SELECT FROM workers_jobs j WHERE j.seq = ANY(p_seqs) AND (j.ordering_key IS NOT NULL OR j.dependents <> 0)
    ) THEN
        WITH ended AS (
            UPDATE workers_jobs j SET state = 'completed', worker = NULL, lease_until = NULL, cancel_requested = 0,
                finished_at = v_now, expires_at = v_now + p_keeps[array_position(p_seqs, j.seq)]
            WHERE j.seq = ANY(p_seqs) AND (j.queue, j.token, j.id, j.state, j.dependents) IS NOT DISTINCT FROM (
                p_queue, p_tokens[array_position(p_seqs, j.seq)], p_ids[array_position(p_seqs, j.seq)], 'processing', 0
            )
            RETURNING array_position(p_seqs, j.seq) AS place, j.id
        )
        SELECT coalesce(array_agg(e.place), '{}'),
            coalesce(array_agg('result:' || translate(encode(p_results[e.place], 'base64'), E'\n', '') || ' ' || e.id)
                FILTER (WHERE p_keeps[e.place] < 60000 AND octet_length(p_results[e.place]) <= 4096), '{}')
            || coalesce(array_agg('completed:' || e.id), '{}')
        INTO v_ended, v_events FROM ended e;
        UPDATE workers_payloads p SET data = p_results[array_position(p_seqs, p.seq)]
        WHERE p.seq = ANY(ARRAY(SELECT p_seqs[e] FROM unnest(v_ended) e));
        RETURN QUERY SELECT e::bigint, 'applied'::text FROM unnest(v_ended) e;
        IF cardinality(v_ended) = cardinality(p_seqs) THEN
            PERFORM workers_tell(p_queue, v_events, EXISTS (
                SELECT FROM workers_limits l WHERE l.queue = p_queue AND l.name = '*'
            ), p_sure);
            RETURN;
        END IF;
    END IF;
    PERFORM workers_lock_keys(p_queue, p_seqs);
    PERFORM FROM workers_jobs j WHERE j.seq = ANY(p_seqs) ORDER BY j.seq FOR UPDATE;
    FOR v_job IN
        SELECT a.*, j.state, j.ordering_key, j.attempts, j.max_attempts, j.uncounted, j.dependents
        FROM unnest(p_seqs, p_tokens, p_ids, p_kinds, p_keeps, p_delays, p_errors, p_capped, p_results, p_thens)
            WITH ORDINALITY AS a (seq, token, id, kind, keep, delay, error, capped, result, goes_on, place),
            LATERAL (SELECT * FROM workers_jobs WHERE seq = a.seq OFFSET 0) j
        WHERE (j.queue, j.token, j.id) IS NOT DISTINCT FROM (p_queue, a.token, a.id) AND j.state <> 'cancelled'
            AND a.place <> ALL(v_ended)
    LOOP
        place := v_job.place;
        IF v_job.state <> 'processing' THEN
            outcome := 'already_applied';
            RETURN NEXT;
            CONTINUE;
        END IF;
        outcome := 'applied';
        RETURN NEXT;
        v_kind := v_job.kind;
        IF v_kind = 'uncounted' AND v_job.uncounted >= p_uncounted_limit THEN
            v_kind := CASE WHEN v_job.attempts >= v_job.max_attempts THEN 'capped' ELSE 'retried' END;
        END IF;
        IF v_job.ordering_key IS NOT NULL THEN
            v_keys := v_keys || v_job.ordering_key;
        END IF;
        IF v_kind IN ('completed', 'failed', 'capped') THEN
            IF v_kind = 'completed' AND coalesce(v_job.keep, 0) < 60000 AND octet_length(v_job.result) <= 4096 THEN
                v_events := v_events
                    || ('result:' || translate(encode(v_job.result, 'base64'), E'\n', '') || ' ' || v_job.id);
            END IF;
            v_events := v_events
                || ((CASE WHEN v_kind = 'completed' THEN 'completed:' ELSE 'failed:' END) || v_job.id);
            -- First, because those that came after it are told by the change of its state.
            IF v_kind = 'completed' AND (v_job.keep IS NOT NULL OR v_job.dependents <> 0) THEN
                UPDATE workers_payloads SET data = v_job.result WHERE seq = v_job.seq;
            END IF;
            IF v_job.keep IS NULL THEN
                v_dropped := v_dropped || v_job.seq;
                IF v_job.dependents <> 0 THEN  -- a trigger will only see that it is gone
                    PERFORM workers_release(
                        p_queue, v_job.id, CASE WHEN v_kind = 'completed' THEN 'completed' ELSE 'failed' END,
                        CASE WHEN v_kind = 'capped' THEN v_job.capped ELSE v_job.error END
                    );
                END IF;
                CONTINUE;
            END IF;
            UPDATE workers_jobs SET
                state = CASE WHEN v_kind = 'completed' THEN 'completed' ELSE 'failed' END, worker = NULL,
                lease_until = NULL, cancel_requested = 0, finished_at = v_now, expires_at = v_now + v_job.keep,
                error = coalesce(CASE WHEN v_kind = 'capped' THEN v_job.capped ELSE v_job.error END, error)
            WHERE seq = v_job.seq;
            CONTINUE;
        END IF;
        v_wake := true;
        IF v_kind = 'continued' THEN
            v_events := v_events || ('queued:' || v_job.id);
            SELECT * INTO v_then FROM json_to_record(v_job.goes_on::json) AS t (
                name text, priority integer, max_attempts integer, keep_completed bigint, keep_failed bigint,
                key text, backoff text, chain_index integer, meta text
            );
            -- The new number puts it behind everything that is there.
            UPDATE workers_jobs SET
                seq = nextval('workers_jobs_seq_seq'), name = v_then.name, priority = v_then.priority,
                state = CASE WHEN v_job.delay > 0 THEN 'scheduled' ELSE 'ready' END, run_at = v_now + v_job.delay,
                attempts = 0, max_attempts = v_then.max_attempts, stalls = 0, uncounted = 0, cancel_requested = 0,
                keep_completed = v_then.keep_completed, keep_failed = v_then.keep_failed, ordering_key = v_then.key,
                backoff = v_then.backoff, chain_index = v_then.chain_index, meta = v_then.meta, worker = NULL, lease_until = NULL,
                error = NULL, failures = NULL
            WHERE seq = v_job.seq RETURNING seq INTO v_seq;
            UPDATE workers_payloads SET seq = v_seq, data = v_job.result WHERE seq = v_job.seq;
            CONTINUE;
        END IF;
        v_events := v_events || ((CASE WHEN v_kind IN ('released', 'postponed') THEN 'queued:' ELSE 'failing:' END) || v_job.id);
        UPDATE workers_jobs SET
            state = CASE
                WHEN NOT v_job.delay > 0 THEN 'ready'
                WHEN v_kind = 'postponed' AND error IS NULL THEN 'scheduled'
                ELSE 'failing'
            END, worker = NULL, lease_until = NULL,
            cancel_requested = 0, attempts = attempts - CASE WHEN v_kind = 'retried' THEN 0 ELSE 1 END,
            uncounted = CASE v_kind WHEN 'retried' THEN 0 WHEN 'uncounted' THEN uncounted + 1 ELSE uncounted END,
            run_at = coalesce(v_now + v_job.delay, run_at), error = coalesce(v_job.error, error)
        WHERE seq = v_job.seq;
    END LOOP;
    IF cardinality(v_dropped) > 0 THEN
        DELETE FROM workers_jobs WHERE seq = ANY(v_dropped);
        DELETE FROM workers_payloads WHERE seq = ANY(v_dropped);
    END IF;
    IF cardinality(v_keys) > 0 THEN
        PERFORM workers_unhold(p_queue, v_keys);
        v_wake := true;
    END IF;
    IF NOT v_wake AND cardinality(v_events) > 0 THEN  -- one of the places of the whole queue is free
        v_wake := EXISTS (SELECT FROM workers_limits l WHERE l.queue = p_queue AND l.name = '*');
    END IF;
    PERFORM workers_tell(p_queue, v_events, v_wake, p_sure);
END $$;
