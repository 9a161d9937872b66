"""RabbitMQ through aio-pika: topic exchanges, quorum queues with a single active consumer."""
