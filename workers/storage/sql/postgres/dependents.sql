-- Jobs that follow others on PostgreSQL; see `../steps/dependents.py`.

-- Release or fail those that wait for a job that has ended, and those that wait for these. p_ended: its state, or
-- `removed`. Each is told how it ended; the result of a completed job is in the place of its payload by then. The rows of the dependents are locked before anybody looks whom else they wait for: so of several that end
-- at once the last one sees that it is the last. They are written even if nothing changes in them, for callers'
-- transactions, which may look at an old snapshot: of two such the second fails.
CREATE OR REPLACE FUNCTION workers_release(p_queue integer, p_id text, p_ended text, p_error text) RETURNS void
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := workers_now();
    v_queues integer[] := ARRAY[p_queue]; -- of the jobs that have ended
    v_ids text[] := ARRAY[p_id];
    v_ends text[] := ARRAY[p_ended];
    v_errors text[] := ARRAY[p_error];
    v_at integer := 0;
    v_seqs bigint[];
    v_job record;
    v_error text;
    v_events text[] := '{}';
    v_told integer[] := '{}'; -- the queue of each event
    v_queue integer;
BEGIN
    WHILE v_at < cardinality(v_ids) LOOP
        v_at := v_at + 1;
        v_seqs := ARRAY(SELECT dependent FROM workers_dependencies WHERE queue = v_queues[v_at] AND job_id = v_ids[v_at]);
        CONTINUE WHEN cardinality(v_seqs) = 0;
        PERFORM FROM workers_jobs WHERE seq = ANY(v_seqs) ORDER BY seq FOR UPDATE;
        INSERT INTO workers_outcomes (queue, job_id, other_queue, other_id, ended, error, result)
        SELECT j.queue, j.id, q.name, v_ids[v_at], v_ends[v_at], v_errors[v_at], (
            SELECT p.data FROM workers_jobs o JOIN workers_payloads p ON p.seq = o.seq
            WHERE o.queue = v_queues[v_at] AND o.id = v_ids[v_at] AND v_ends[v_at] = 'completed'
                AND octet_length(p.data) <= 65536
        )
        FROM workers_jobs j JOIN workers_queues q ON q.id = v_queues[v_at]
        WHERE j.seq = ANY(v_seqs) AND j.state = 'waiting'
        ON CONFLICT (queue, job_id, other_queue, other_id) DO NOTHING;
        FOR v_job IN
            DELETE FROM workers_dependencies d USING workers_jobs j
            WHERE d.queue = v_queues[v_at] AND d.job_id = v_ids[v_at] AND d.dependent = ANY(v_seqs)
                AND j.seq = d.dependent AND j.state = 'waiting'
            RETURNING j.seq, j.queue, j.id, j.run_at - j.created_at AS delay, j.keep_failed, d.fails
        LOOP
            IF v_job.fails <> 0 AND v_ends[v_at] <> 'completed' THEN
                v_error := json_build_object(
                    'dependency', v_ids[v_at],
                    'queue', (SELECT name FROM workers_queues WHERE id = v_queues[v_at] AND id <> v_job.queue),
                    'ended', v_ends[v_at], 'cause',
                    CASE WHEN v_errors[v_at] LIKE '{%' THEN '["DependencyFailed", ""' ELSE left(v_errors[v_at], 1000) END
                );
                v_queues := v_queues || v_job.queue;
                v_ids := v_ids || v_job.id;
                v_ends := v_ends || 'failed'::text;
                v_errors := v_errors || v_error;
                v_events := v_events || ('failed:' || v_job.id);
                v_told := v_told || v_job.queue;
                DELETE FROM workers_dependencies WHERE dependent = v_job.seq;
                IF v_job.keep_failed IS NULL THEN
                    UPDATE workers_jobs SET dependents = 0 WHERE seq = v_job.seq; -- whose end is told here, by no trigger
                    DELETE FROM workers_jobs WHERE seq = v_job.seq;
                    DELETE FROM workers_payloads WHERE seq = v_job.seq;
                ELSE
                    UPDATE workers_jobs SET state = 'failed', finished_at = v_now, error = v_error,
                        expires_at = v_now + v_job.keep_failed
                    WHERE seq = v_job.seq;
                END IF;
            ELSIF EXISTS (SELECT FROM workers_dependencies WHERE dependent = v_job.seq) THEN
                UPDATE workers_jobs SET state = state WHERE seq = v_job.seq;
            ELSE
                v_events := v_events || ('queued:' || v_job.id);
                v_told := v_told || v_job.queue;
                UPDATE workers_jobs SET state = CASE WHEN v_job.delay > 0 THEN 'scheduled' ELSE 'ready' END,
                    run_at = v_now + v_job.delay
                WHERE seq = v_job.seq;
            END IF;
        END LOOP;
    END LOOP;
    FOR v_queue IN SELECT DISTINCT q FROM unnest(v_told) q LOOP
        PERFORM workers_tell(
            v_queue, ARRAY(SELECT e FROM unnest(v_events, v_told) AS t(e, q) WHERE q = v_queue), true, true
        );
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION workers_ended() RETURNS trigger LANGUAGE plpgsql
AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        PERFORM workers_release(OLD.queue, OLD.id, 'removed', NULL);
    ELSE
        PERFORM workers_release(NEW.queue, NEW.id, NEW.state, CASE WHEN NEW.state = 'failed' THEN NEW.error END);
    END IF;
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION workers_waited() RETURNS trigger LANGUAGE plpgsql
AS $$
BEGIN
    DELETE FROM workers_dependencies WHERE dependent = OLD.seq;
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION workers_follower_gone() RETURNS trigger LANGUAGE plpgsql
AS $$
BEGIN
    DELETE FROM workers_outcomes WHERE queue = OLD.queue AND job_id = OLD.id;
    RETURN NULL;
END $$;

-- Triggers see every end of a job, whoever makes it. Where nobody waits their conditions alone are looked at. Those that `workers_release` itself fails are in its own list.
DO $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM pg_trigger WHERE tgrelid = 'workers_jobs'::regclass AND tgname = 'workers_jobs_ended'
    ) THEN
        CREATE TRIGGER workers_jobs_ended AFTER UPDATE OF state ON workers_jobs FOR EACH ROW
        WHEN (OLD.dependents <> 0 AND OLD.expires_at IS NULL AND NEW.expires_at IS NOT NULL AND pg_trigger_depth() = 0)
        EXECUTE FUNCTION workers_ended();
        CREATE TRIGGER workers_jobs_gone AFTER DELETE ON workers_jobs FOR EACH ROW
        WHEN (OLD.dependents <> 0 AND OLD.expires_at IS NULL AND pg_trigger_depth() = 0)
        EXECUTE FUNCTION workers_ended();
        CREATE TRIGGER workers_jobs_waited AFTER UPDATE OF state ON workers_jobs FOR EACH ROW
        WHEN (OLD.state = 'waiting' AND NEW.state <> 'waiting') EXECUTE FUNCTION workers_waited();
        CREATE TRIGGER workers_jobs_waited_gone AFTER DELETE ON workers_jobs FOR EACH ROW
        WHEN (OLD.state = 'waiting') EXECUTE FUNCTION workers_waited();
    END IF;
    IF NOT EXISTS (
        SELECT FROM pg_trigger WHERE tgrelid = 'workers_jobs'::regclass AND tgname = 'workers_jobs_follower_gone'
    ) THEN
        CREATE TRIGGER workers_jobs_follower_gone AFTER DELETE ON workers_jobs FOR EACH ROW
        WHEN (OLD.follows <> 0) EXECUTE FUNCTION workers_follower_gone();
    END IF;
END $$;
