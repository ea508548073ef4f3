-- Limits and fair keys on PostgreSQL; see `../steps/limits.py`. A key begins with the character 30. Only claims call these
-- functions, and they hold the advisory lock of the key.

-- Return how many jobs may pass the key, beside `p_taken` that this claim has taken, and when it opens if a token does
-- that. `p_now` is in microseconds.
CREATE OR REPLACE FUNCTION workers_room(
    p_queue integer, p_gate text, p_taken integer, p_now bigint, OUT room integer, OUT opens_at bigint
) LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    v_limit record;
    v_running integer;
    v_full bigint;
    v_empty bigint;
BEGIN
    room := 1000000;
    SELECT l.concurrency, l.gap, l.capacity INTO v_limit FROM workers_limits l WHERE l.queue = p_queue
        AND l.name = CASE WHEN p_gate = E'\x1eQ' THEN '*' ELSE split_part(substr(p_gate, 3), E'\x1f', 1) END;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF v_limit.concurrency IS NOT NULL THEN
        IF p_gate = E'\x1eQ' THEN
            SELECT count(*) INTO v_running FROM (
                SELECT FROM workers_jobs j WHERE j.queue = p_queue AND j.state = 'processing'
                ORDER BY j.lease_until LIMIT v_limit.concurrency
            ) running;
        ELSE
            SELECT count(*) INTO v_running FROM (
                SELECT FROM workers_jobs j
                WHERE j.queue = p_queue AND j.state = 'processing' AND j.ordering_key = p_gate
                LIMIT v_limit.concurrency
            ) running;
        END IF;
        room := greatest(0, v_limit.concurrency - v_running - p_taken);
    END IF;
    IF room = 0 OR v_limit.gap IS NULL THEN
        RETURN;
    END IF;
    SELECT g.full_at INTO v_full FROM workers_gates g WHERE g.queue = p_queue AND g.gate = p_gate AND g.name = '';
    v_full := greatest(v_full, p_now);
    v_empty := p_now + v_limit.capacity * v_limit.gap;
    IF v_full > v_empty THEN  -- the clock was set back
        v_full := v_empty;
        UPDATE workers_gates g SET full_at = v_empty WHERE g.queue = p_queue AND g.gate = p_gate AND g.name = '';
    END IF;
    room := least(room, (v_empty - v_full) / v_limit.gap);
    opens_at := v_full - (v_limit.capacity - 1) * v_limit.gap;
END $$;

-- Take tokens from the key's bucket.
CREATE OR REPLACE FUNCTION workers_take_tokens(p_queue integer, p_gate text, p_count integer, p_now bigint)
RETURNS void LANGUAGE sql
AS $$
    INSERT INTO workers_gates (queue, gate, name, full_at)
    SELECT p_queue, p_gate, '', p_now + p_count * l.gap FROM workers_limits l
    WHERE l.queue = p_queue AND l.gap IS NOT NULL
        AND l.name = CASE WHEN p_gate = E'\x1eQ' THEN '*' ELSE split_part(substr(p_gate, 3), E'\x1f', 1) END
    ON CONFLICT (queue, gate, name) DO UPDATE
    SET full_at = greatest(workers_gates.full_at, p_now) + excluded.full_at - p_now
$$;

-- Tell how many jobs of all may start. It reads what claims that run write.
CREATE OR REPLACE FUNCTION workers_full(p_queue integer, p_now bigint, OUT room integer, OUT opens_at bigint)
LANGUAGE plpgsql
AS $$
BEGIN
    room := 1;
    IF EXISTS (SELECT FROM workers_limits l WHERE l.queue = p_queue AND l.name = '*') THEN
        SELECT r.room, r.opens_at INTO room, opens_at FROM workers_room(p_queue, E'\x1eQ', 0, p_now) r;
    END IF;
END $$;

-- Return a fair key, or any key, and a name as one text.
CREATE OR REPLACE FUNCTION workers_turn(p_gate text, p_name text) RETURNS text LANGUAGE sql IMMUTABLE
AS $$ SELECT length(p_gate) || p_gate || p_name $$;

-- Look at the key again at that time.
CREATE OR REPLACE FUNCTION workers_open_later(p_queue integer, p_gate text, p_at bigint) RETURNS void LANGUAGE sql
AS $$
    INSERT INTO workers_gates (queue, gate, name, opens_at) SELECT p_queue, p_gate, '', p_at WHERE p_at IS NOT NULL
    ON CONFLICT (queue, gate, name) DO UPDATE SET opens_at = excluded.opens_at
$$;

-- Tell whether the fair key has a front for that name which is ready, as urgent as this job at least, and not the job.
CREATE OR REPLACE FUNCTION workers_has_front(p_queue integer, p_gate text, p_name text, p_seq bigint)
RETURNS boolean LANGUAGE sql
SET enable_seqscan = off SET jit = off
AS $$
    SELECT EXISTS (
        SELECT FROM workers_gates g JOIN workers_jobs j ON j.seq = g.front
        WHERE g.queue = p_queue AND g.gate = p_gate AND g.name = p_name AND j.state = 'ready' AND j.seq <> p_seq
            AND j.priority <= (SELECT mine.priority FROM workers_jobs mine WHERE mine.seq = p_seq)
    )
$$;

-- Tell whether the job may be taken. If a limit keeps it back until there is a token, note until when. `p_turned` are
-- the fair keys, each with a name, that had a turn in this claim and have no front.
CREATE OR REPLACE FUNCTION workers_passes(
    p_queue integer, p_seq bigint, p_gate text, p_name text, p_taken integer, p_turned text[], p_now bigint
) RETURNS boolean LANGUAGE plpgsql
AS $$
DECLARE
    v_room record;
BEGIN
    IF left(p_gate, 2) = E'\x1eF' THEN
        RETURN workers_turn(p_gate, p_name) <> ALL(p_turned) AND NOT workers_has_front(p_queue, p_gate, p_name, p_seq);
    END IF;
    SELECT * INTO v_room FROM workers_room(p_queue, p_gate, p_taken, p_now);
    IF v_room.room > 0 THEN
        PERFORM workers_take_tokens(p_queue, p_gate, 1, p_now);
        RETURN true;
    END IF;
    PERFORM workers_open_later(p_queue, p_gate, v_room.opens_at);
    RETURN false;
END $$;

-- Let the next jobs of the key come up, at most `p_wanted` of the name; return whether some did.
CREATE OR REPLACE FUNCTION workers_come_up(
    p_queue integer, p_gate text, p_name text, p_taken integer, p_wanted integer, p_now bigint
) RETURNS boolean LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
AS $$
DECLARE
    v_room record;
    v_seqs bigint[];
    v_seq bigint;
    v_new bigint;
BEGIN
    IF left(p_gate, 2) = E'\x1eF' THEN
        SELECT j.seq INTO v_seq FROM workers_jobs j
        WHERE j.queue = p_queue AND j.state = 'held' AND j.ordering_key = p_gate AND j.name = p_name
        ORDER BY j.priority, j.run_at, j.seq LIMIT 1 FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            DELETE FROM workers_gates g WHERE g.queue = p_queue AND g.gate = p_gate AND g.name = p_name;
            IF EXISTS (
                SELECT FROM workers_jobs j
                WHERE j.queue = p_queue AND j.state = 'held' AND j.ordering_key = p_gate AND j.name = p_name
            ) THEN  -- a caller's transaction has locked it, and may be undone
                PERFORM workers_open_later(p_queue, p_gate, p_now);
            END IF;
            RETURN false;
        END IF;
        -- The new number puts it behind everything that is ready.
        UPDATE workers_jobs SET seq = nextval('workers_jobs_seq_seq'), state = 'ready',
            run_at = greatest(run_at, p_now / 1000)
        WHERE seq = v_seq RETURNING seq INTO v_new;
        UPDATE workers_payloads SET seq = v_new WHERE seq = v_seq;
        INSERT INTO workers_gates (queue, gate, name, front) VALUES (p_queue, p_gate, p_name, v_new)
        ON CONFLICT (queue, gate, name) DO UPDATE SET front = excluded.front;
        RETURN true;
    END IF;
    SELECT * INTO v_room FROM workers_room(p_queue, p_gate, p_taken, p_now);
    IF v_room.room = 0 THEN
        PERFORM workers_open_later(p_queue, p_gate, v_room.opens_at);
        RETURN false;
    END IF;
    v_seqs := ARRAY(
        SELECT j.seq FROM workers_jobs j
        WHERE j.queue = p_queue AND j.state = 'held' AND j.ordering_key = p_gate AND j.name = p_name
        ORDER BY j.priority, j.run_at, j.seq LIMIT greatest(1, least(p_wanted, v_room.room)) FOR UPDATE SKIP LOCKED
    );
    UPDATE workers_jobs SET state = 'ready' WHERE seq = ANY(v_seqs);
    PERFORM workers_unhold(p_queue, ARRAY[p_gate]);
    RETURN cardinality(v_seqs) > 0;
END $$;

-- Let jobs come up whose key has opened; keys that others have locked are left for the next claim.
CREATE OR REPLACE FUNCTION workers_open_gates(p_queue integer, p_now bigint) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    v_gate text;
    v_late bigint := p_now + coalesce((SELECT max(gap) FROM workers_limits WHERE queue = p_queue), 0);
BEGIN
    FOR v_gate IN
        SELECT g.gate FROM workers_gates g WHERE g.queue = p_queue AND g.opens_at IS NOT NULL
            AND (g.opens_at <= p_now OR g.opens_at > v_late)  -- later: the clock was set back
        ORDER BY g.opens_at LIMIT 500
    LOOP
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(workers_key(p_queue, v_gate));
        DELETE FROM workers_gates g
        WHERE g.queue = p_queue AND g.gate = v_gate AND g.name = '' AND g.full_at IS NULL;
        UPDATE workers_gates g SET opens_at = NULL WHERE g.queue = p_queue AND g.gate = v_gate AND g.name = '';
        PERFORM workers_unhold(p_queue, ARRAY[v_gate]);
    END LOOP;
END $$;
