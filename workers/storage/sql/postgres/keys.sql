-- Deduplication keys on PostgreSQL; see `../steps/enqueue.py`.
-- Jobs are looked up by one key at a time: to PostgreSQL before 17, `= ANY` of several seems no dearer as a filter over
-- the queue's part of the index, by statistics of a time without keys, and OFFSET keeps it from joining otherwise.

-- Return who has these keys at present, by the jobs' rows and by the marks of throttled keys.
CREATE OR REPLACE FUNCTION workers_marked(p_queue integer, p_keys text[])
RETURNS TABLE (key text, seq bigint, id text, mode text, state text, run_at bigint, ordering_key text) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := workers_now();
BEGIN
    RETURN QUERY SELECT j.* FROM unnest(p_keys) k CROSS JOIN LATERAL (
        SELECT deduplication_key, seq, id, deduplication_mode, state, run_at, ordering_key
        FROM workers_jobs WHERE queue = p_queue AND deduplication_key = k AND expires_at IS NULL OFFSET 0
    ) j;
    RETURN QUERY SELECT m.key, j.seq, m.job_id, 'throttle', j.state, j.run_at, j.ordering_key
    FROM workers_marks m LEFT JOIN workers_jobs j ON j.queue = p_queue AND j.id = m.job_id
        AND (j.expires_at IS NULL OR j.expires_at > v_now)
    WHERE m.queue = p_queue AND m.key = ANY(p_keys) AND (m.until > v_now) IS TRUE;  -- not by the index on `until`
END $$;

-- Return who has these keys, and reserve for the transaction all others, and those of p_debounced that a job has by
-- debounce: nobody else takes these keys, or claims that job, until it ends. `own` are the reserved ones that are
-- taken.
CREATE OR REPLACE FUNCTION workers_take_keys(p_queue integer, p_keys text[], p_debounced text[])
RETURNS TABLE (
    key text, seq bigint, id text, mode text, state text, run_at bigint, ordering_key text, own boolean
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_taken text[] := '{}';
    v_left text[];
BEGIN
    own := false;
    FOR key, seq, id, mode, state, run_at, ordering_key IN
        SELECT m.* FROM workers_marked(p_queue, p_keys) m WHERE m.mode <> 'debounce' OR m.key <> ALL(p_debounced)
    LOOP
        v_taken := v_taken || key;
        RETURN NEXT;
    END LOOP;
    v_left := ARRAY(SELECT k FROM unnest(p_keys) k EXCEPT SELECT t FROM unnest(v_taken) t);
    IF cardinality(v_left) = 0 THEN
        RETURN;
    END IF;
    -- Sorted, so that calls with keys in common cannot deadlock.
    INSERT INTO workers_marks (queue, key, job_id, until) SELECT p_queue, k, '', 0 FROM unnest(v_left) k ORDER BY k
    ON CONFLICT (queue, key) DO UPDATE SET until = workers_marks.until;
    -- A transaction that claims or ends one of these jobs has committed by now, or will find that the job waits anew.
    PERFORM FROM workers_jobs j
    WHERE j.seq = ANY(ARRAY(
        SELECT o.seq FROM unnest(v_left) k CROSS JOIN LATERAL (
            SELECT seq FROM workers_jobs
            WHERE queue = p_queue AND deduplication_key = k AND expires_at IS NULL OFFSET 0
        ) o
    )) AND deduplication_key = ANY(v_left) AND expires_at IS NULL
        AND j.deduplication_mode = 'debounce' ORDER BY seq FOR UPDATE;
    RETURN QUERY SELECT m.*, true FROM workers_marked(p_queue, v_left) m;
END $$;
