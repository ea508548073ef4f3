-- Answer an error if a key is in the way of a flow: BullMQ's scripts would insert one half of a job, and not the other.
-- ARGV[1]: prefix of the queue's keys.
return damage(ARGV[1], { 'wait', 'active', 'delayed', 'prioritized', 'waiting-children', 'completed', 'events', 'marker',
  'meta', 'id', 'pc' }) or 1
