-- Wake those who wait for jobs of these names, ARGV[2...], which were enqueued without that.
for at = 2, #ARGV do
  wake(ARGV[at])
end
finish()
