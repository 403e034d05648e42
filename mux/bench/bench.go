// Package bench measures what a packet costs the mux: nanoseconds for each kind
// of packet, and memory for each flow and endpoint.
package bench
