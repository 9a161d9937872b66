"""Apache Kafka and brokers that speak its protocol, through aiokafka."""
