package health

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

// checker asks once and returns why the DIP can't serve, or nil. Each call
// makes a connection of its own, as a client would.
type checker func(ctx context.Context) error

// newChecker also names the check's kind for metrics.
func newChecker(h *quartetv1.Health, dip netip.AddrPort, commands string) (checker, string, error) {
	set := 0
	for _, there := range []bool{h.Http != nil, h.Https != nil, h.Tcp != nil, h.Grpc != nil, h.Command != nil} {
		if there {
			set++
		}
	}
	if set != 1 {
		return nil, "", fmt.Errorf("health: has %d checks that this agent knows: exactly one of http, https, tcp, grpc and command is wanted", set)
	}
	switch {
	case h.Http != nil:
		c, err := httpChecker("http", h.Http, dip)
		return c, "http", err
	case h.Https != nil:
		c, err := httpChecker("https", h.Https, dip)
		return c, "https", err
	case h.Tcp != nil:
		return tcpChecker(dip), "tcp", nil
	case h.Grpc != nil:
		return grpcChecker(h.Grpc.Service, dip), "grpc", nil
	}
	c, err := commandChecker(h.Command.Argv, dip, commands)
	return c, "command", err
}

func httpChecker(scheme string, h *quartetv1.HttpCheck, dip netip.AddrPort) (checker, error) {
	path := h.Path
	if path == "" {
		path = "/"
	}
	u, err := url.ParseRequestURI(path)
	if err != nil || path[0] != '/' {
		return nil, fmt.Errorf("health.%s.path: %q is not a path: one that begins with / is wanted", scheme, path)
	}
	u.Scheme, u.Host = scheme, dip.String()
	serverName := h.Host
	if name, _, err := net.SplitHostPort(h.Host); err == nil {
		serverName = name
	}
	if serverName == "" {
		serverName = dip.Addr().String()
	}
	client := &http.Client{
		Transport: &http.Transport{
			DisableKeepAlives: true,
			TLSClientConfig: &tls.Config{
				ServerName:         serverName,
				InsecureSkipVerify: !h.Verify, //nolint:gosec // the operator's choice: is it up, not who is it
			},
		},
		// A redirect is the server's answer.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
		if err != nil {
			return err
		}
		request.Host = h.Host
		request.Header.Set("User-Agent", "quartet-hostagent")
		response, err := client.Do(request)
		if err != nil {
			if e := (*url.Error)(nil); errors.As(err, &e) {
				err = e.Err
			}
			return err
		}
		_ = response.Body.Close()
		if got := uint32(response.StatusCode); len(h.Statuses) == 0 && (got < 200 || got > 299) {
			return fmt.Errorf("status %d, 200..299 is wanted", got)
		} else if len(h.Statuses) > 0 && !slices.Contains(h.Statuses, got) {
			return fmt.Errorf("status %d, one of %d is wanted", got, h.Statuses)
		}
		return nil
	}, nil
}

func tcpChecker(dip netip.AddrPort) checker {
	return func(ctx context.Context) error {
		connection, err := new(net.Dialer).DialContext(ctx, "tcp", dip.String())
		if err != nil {
			return err
		}
		return connection.Close()
	}
}

func grpcChecker(service string, dip netip.AddrPort) checker {
	return func(ctx context.Context) error {
		connection, err := grpc.NewClient("passthrough:///"+dip.String(),
			grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy(),
			grpc.WithUserAgent("quartet-hostagent"))
		if err != nil {
			return err
		}
		defer func() { _ = connection.Close() }()
		response, err := healthpb.NewHealthClient(connection).Check(ctx, &healthpb.HealthCheckRequest{Service: service})
		if status.Code(err) == codes.DeadlineExceeded {
			return context.DeadlineExceeded
		}
		if err != nil {
			return errors.New(status.Convert(err).Message())
		}
		if response.Status != healthpb.HealthCheckResponse_SERVING {
			return fmt.Errorf("service %q is %s", service, response.Status)
		}
		return nil
	}
}

// commandChecker runs a program of the directory commands, and no other.
func commandChecker(argv []string, dip netip.AddrPort, commands string) (checker, error) {
	if len(argv) == 0 || argv[0] == "" {
		return nil, errors.New("health.command.argv: is empty: a program's name is wanted")
	}
	name := argv[0]
	if commands != "" && filepath.Dir(name) == filepath.Clean(commands) {
		name = filepath.Base(name)
	}
	if strings.ContainsRune(name, '/') || name == "." || name == ".." {
		return nil, fmt.Errorf("health.command.argv[0]: %q: the name of a program in the agent's --check-commands directory is wanted", argv[0])
	}
	return func(ctx context.Context) error {
		if commands == "" {
			return errors.New("this agent runs no check commands (--check-commands is not set)")
		}
		program := filepath.Join(commands, name)
		var output limitedBuffer
		command := exec.CommandContext(ctx, program, argv[1:]...)
		command.Dir = commands
		command.Env = []string{
			"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
			"DIP=" + dip.Addr().String(), "PORT=" + strconv.Itoa(int(dip.Port())),
		}
		command.Stdout, command.Stderr = &output, &output
		// What the program started goes with it.
		command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		command.Cancel = func() error { return syscall.Kill(-command.Process.Pid, syscall.SIGKILL) }
		command.WaitDelay = 100 * time.Millisecond
		err := command.Run()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, fs.ErrNotExist):
			return fmt.Errorf("%s is not in %s", name, commands)
		case errors.Is(err, fs.ErrPermission):
			return fmt.Errorf("%s is not executable", program)
		}
		if line, _, _ := strings.Cut(strings.TrimSpace(output.String()), "\n"); line != "" {
			return fmt.Errorf("%w: %s", err, line)
		}
		return err
	}, nil
}

// limitedBuffer keeps the first bytes of what a program prints.
type limitedBuffer struct{ bytes.Buffer }

func (b *limitedBuffer) Write(p []byte) (int, error) {
	if room := 256 - b.Len(); room > 0 {
		b.Buffer.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

// explain is a failure in one line that an operator understands.
func explain(err error, timeout time.Duration) string {
	var network net.Error
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &network) && network.Timeout():
		return fmt.Sprintf("no answer within %s", timeout)
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused"
	case errors.Is(err, syscall.ECONNRESET):
		return "connection reset"
	case errors.Is(err, syscall.EHOSTUNREACH):
		return "no route to host"
	case errors.Is(err, syscall.ENETUNREACH):
		return "network is unreachable"
	}
	text := strings.Join(strings.Fields(err.Error()), " ")
	return strings.ToValidUTF8(text[:min(len(text), 256)], "")
}
